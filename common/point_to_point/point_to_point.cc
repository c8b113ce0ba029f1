// Brings announcements and posted receives together.
#include "point_to_point/point_to_point.h"

#include <cstring>

#include "base/clock.h"

namespace perseus {
namespace {

// The same on both ranks.
std::string size_mismatch(int sender, uint64_t bytes, int receiver, uint64_t room, int64_t tag) {
  return "Mismatched sizes: rank " + std::to_string(sender) + " sends " + std::to_string(bytes) + " bytes to rank " +
         std::to_string(receiver) + " with tag " + std::to_string(tag) + ", but the receive there is of " +
         std::to_string(room) + " bytes. Receive into a tensor of the size that is sent.";
}

// Who has not started what for this rank's send or receive.
std::string missing_half(const World& world, const Entry& entry) {
  const bool sends = entry.description.kind == Kind::kSend;
  const int peer = entry.description.root;
  std::string who = "rank " + std::to_string(peer) + " has";
  if (peer == kAnySource) {
    who = "none of ranks";
    for (int rank = 0; rank < world.size; ++rank)
      if (rank != world.rank) who += (who.back() == 's' ? " " : ", ") + std::to_string(rank);
    who += " has";
  } else {
    who += " not";
  }
  return who + " started a " + (sends ? "receive from" : "send to") + " rank " + std::to_string(world.rank) +
         " with tag " + std::to_string(entry.tag);
}

}  // namespace

bool PointToPoint::submit(Entry* entry) {
  const MutexLock lock(mutex_);
  if (refuses_) return false;
  submitted_.reserve(submitted_.size() + 1);
  entries_.insert(entry);
  submitted_.push_back(entry);
  any_submitted_.store(true, std::memory_order_release);
  return true;
}

bool PointToPoint::collect() {
  if (!any_submitted_.load(std::memory_order_acquire)) return false;
  {
    const MutexLock lock(mutex_);
    collected_.swap(submitted_);
    any_submitted_.store(false, std::memory_order_relaxed);
  }
  for (Entry* entry : collected_) admit(entry);
  collected_.clear();
  return true;
}

void PointToPoint::admit(Entry* entry) {
  if (entry->description.kind == Kind::kSend) admit_send(entry);
  else admit_receive(entry);
}

void PointToPoint::admit_send(Entry* send) {
  const int peer = send->description.root;
  if (left_.count(peer) != 0) return fail_all({send}, shutdown_text_(peer));
  PeerLink* link = find(peer);
  if (link == nullptr) link = &make_link(peer);
  if (link->ended()) return fail_all({send}, shutdown_text_(peer));
  link->announce(send);
}

void PointToPoint::admit_receive(Entry* receive) {
  const int source = receive->description.root;
  std::optional<Matching::Arrival> arrival = matching_.take_arrival(source, receive->tag);
  if (!arrival) {
    const PeerLink* link = find(source);
    if (link != nullptr && link->ended()) return fail_all({receive}, shutdown_text_(source));
    return matching_.add(receive);
  }
  PeerLink& from = *find(arrival->peer);
  if (arrival->held) from.release(arrival->bytes);
  if (!pair(from, receive, arrival->id, arrival->bytes)) return;
  if (arrival->whole) take_whole(from, receive, arrival->id, arrival->held.get());
  else from.receive(arrival->id, receive);
}

// ---- links ----

PeerLink* PointToPoint::find(int peer) const {
  const auto found = links_.find(peer);
  return found == links_.end() ? nullptr : found->second.get();
}

PeerLink& PointToPoint::make_link(int peer) {
  PeerLink::Listener& told = *this;
  auto made = std::make_unique<PeerLink>(peer, &link_to_(peer), world_.epoch, &told);
  if (closed_) made->close();
  PeerLink& link = *(links_[peer] = std::move(made));
  tell_of_link_(peer);
  return link;
}

void PointToPoint::on_link_made(int peer) {
  PeerLink* link = find(peer);
  (link != nullptr ? *link : make_link(peer)).on_made();
}

void PointToPoint::on_left(int peer) {
  left_.insert(peer);
  PeerLink* link = find(peer);
  if (link != nullptr) link->on_left();
}

// ---- what arrives ----

void PointToPoint::on_announced(PeerLink& from, const Announcement& message) {
  Entry* receive = matching_.take_receive(from.peer(), message.tag);
  if (receive != nullptr) {
    if (!pair(from, receive, message.id, message.bytes)) return;
    if (message.whole) take_whole(from, receive, message.id, message.data.data);
    else from.receive(message.id, receive);
    return;
  }
  Matching::Arrival arrival{from.peer(), message.tag, message.id, message.bytes, message.whole, nullptr};
  if (message.data.size > 0) {
    from.hold(message.data.size);
    arrival.held.reset(new Byte[message.data.size]);
    std::memcpy(arrival.held.get(), message.data.data, message.data.size);
  }
  matching_.add(std::move(arrival));
}

bool PointToPoint::pair(PeerLink& from, Entry* receive, uint64_t id, uint64_t bytes) {
  receive->description.root = from.peer();
  if (receive->bytes == bytes) {
    receive->agreed_ns = receive->started_ns = now_ns();
    return true;
  }
  from.refuse(id, receive->bytes);
  finish(receive, Status{false, ErrorKind::kMismatch,
                         size_mismatch(from.peer(), bytes, world_.rank, receive->bytes, receive->tag)});
  return false;
}

void PointToPoint::take_whole(PeerLink& from, Entry* receive, uint64_t id, const Byte* data) {
  if (receive->bytes > 0) std::memcpy(receive->buffers[0].out, data, receive->bytes);
  from.accept(id);
  finish(receive);
}

void PointToPoint::on_accepted(Entry* send) { send->agreed_ns = send->started_ns = now_ns(); }

void PointToPoint::on_refused(PeerLink& by, Entry* send, uint64_t room) {
  finish(send,
         Status{false, ErrorKind::kMismatch, size_mismatch(world_.rank, send->bytes, by.peer(), room, send->tag)});
}

void PointToPoint::on_bye(PeerLink& from, const std::vector<Entry*>& unfinished) {
  const std::string text = shutdown_text_(from.peer());
  fail_all(unfinished, text);
  fail_all(matching_.end(from.peer()), text);
}

// ---- the pass ----

bool PointToPoint::step(int64_t now, bool woken) {
  bool moved = collect();
  for (auto& [peer, link] : links_) moved |= link->step(now, woken);
  return moved;
}

void PointToPoint::check_progress(int64_t now, int64_t since_ns, int64_t timeout_ns) {
  for (auto& [peer, link] : links_) link->check_progress(now, since_ns, timeout_ns);
}

std::optional<PointToPoint::Unmatched> PointToPoint::oldest_unmatched() {
  const Entry* oldest = nullptr;
  const MutexLock lock(mutex_);
  for (const Entry* entry : entries_)
    if (entry->agreed_ns == 0 && (oldest == nullptr || entry->submitted_ns < oldest->submitted_ns)) oldest = entry;
  if (oldest == nullptr) return std::nullopt;
  return Unmatched{oldest->submitted_ns, missing_half(world_, *oldest)};
}

bool PointToPoint::moving() const {
  for (auto& [peer, link] : links_)
    if (link->moving()) return true;
  return false;
}

void PointToPoint::finish(Entry* entry, Status status) {
  ended_.emplace_back(entry, std::move(status));
  const MutexLock lock(mutex_);
  entries_.erase(entry);
}

void PointToPoint::fail_all(const std::vector<Entry*>& entries, const std::string& text) {
  for (Entry* entry : entries) finish(entry, Status{false, ErrorKind::kAborted, text});
}

// ---- the end ----

void PointToPoint::close(const std::string& text) {
  if (closed_) return;
  closed_ = true;
  {
    const MutexLock lock(mutex_);
    refuses_ = true;
  }
  collect();
  for (auto& [peer, link] : links_) link->close();
  std::vector<Entry*> receives;
  matching_.for_each_receive([&](Entry* receive) { receives.push_back(receive); });
  matching_.clear();
  fail_all(receives, text);
}

void PointToPoint::abandon(std::vector<Entry*>* entries) {
  const MutexLock lock(mutex_);
  refuses_ = true;
  entries->insert(entries->end(), entries_.begin(), entries_.end());
  entries_.clear();
  submitted_.clear();
  any_submitted_.store(false, std::memory_order_relaxed);
  collected_.clear();
  matching_.clear();
  links_.clear();
}

size_t PointToPoint::staging_bytes() const {
  size_t bytes = 0;
  for (auto& [peer, link] : links_) bytes += link->held();
  return bytes;
}

}  // namespace perseus

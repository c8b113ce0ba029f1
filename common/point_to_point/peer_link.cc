// The two directions of a link, each a message at a time.
#include "point_to_point/peer_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace perseus {
namespace {

constexpr uint32_t kMagic = 0x50503250;  // "PP2P"

}  // namespace

PointToPointHeader PeerLink::header(PointToPointType type, uint64_t id) const {
  PointToPointHeader header;
  header.magic = kMagic;
  header.epoch = epoch_;
  header.type = type;
  header.id = id;
  return header;
}

void PeerLink::say(PointToPointType type, uint64_t id, uint64_t bytes) {
  if (left_) return;
  Outgoing message{header(type, id), nullptr};
  message.header.bytes = bytes;
  queue_.push_back(std::move(message));
}

void PeerLink::announce(Entry* send) {
  Outgoing message{header(PointToPointType::kAnnounce, announced_ + 1), nullptr};
  message.header.tag = send->tag;
  message.header.bytes = send->bytes;
  const bool whole = send->bytes <= kMostEager && eager_ + send->bytes <= kMostHeld;
  const size_t eager = whole ? send->bytes : 0;
  if (eager > 0) {
    // A copy, because the entry may fail while its announcement waits for room.
    message.data.reset(new Byte[eager]);
    std::memcpy(message.data.get(), send->buffers[0].in, eager);
    message.header.length = static_cast<uint32_t>(eager);
  }
  unanswered_.emplace(++announced_, Unanswered{send, eager, whole});
  eager_ += eager;
  queue_.push_back(std::move(message));
}

void PeerLink::receive(uint64_t id, Entry* receive) {
  payloads_in_.push_back(Payload{id, receive, 0});
  say(PointToPointType::kGo, id);
}

void PeerLink::hold(size_t bytes) {
  if (held_ + bytes > kMostHeld) report_nonsense("more than may come along with announcements");
  held_ += bytes;
}

bool PeerLink::moving() const {
  if (!payloads_in_.empty() || (closed_ && !ended_ && !unanswered_.empty())) return true;
  if (left_) return false;
  return sending_ || !queue_.empty() || !payloads_out_.empty() || (closed_ && !said_bye_);
}

bool PeerLink::step(int64_t now, bool woken) {
  bool moved = false;
  // Looking at a stream costs a system call, and its events are reported.
  const bool looks = woken || look_again_ || receiver_.looks_for_free() || !payloads_in_.empty();
  if (looks && !ended_) moved |= receive_some();
  if (!left_) moved |= send_some();
  if (moved || !moving()) moved_ns_ = now;
  return moved;
}

void PeerLink::check_progress(int64_t now, int64_t since_ns, int64_t timeout_ns) {
  look_again_ = true;  // a connection that broke while nothing was under way
  if (!moving() || now - std::max(moved_ns_, since_ns) <= timeout_ns) return;
  fail(ErrorKind::kTimeout, "[p2p] no data to or from rank " + std::to_string(peer_) + " for " +
                                std::to_string(timeout_ns / kSecond) +
                                " s (GLOO_TIMEOUT_SECONDS) amid sends and receives; a living rank answers whatever " +
                                "its script does, so look at the network");
}

// ---- sending ----

bool PeerLink::send_some() {
  bool moved = false;
  for (int i = 0; i < kMostAtOnce; ++i) {
    if (!sending_ && !begin_next()) break;
    const Moved now = sender_.send(out_.header.length, &out_at_, true);
    moved |= now != Moved::kNothing;
    if (now != Moved::kAll) break;
    end_message();
  }
  return moved;
}

// What is short goes first, so that nothing small waits behind a large payload for longer than a piece takes.
bool PeerLink::begin_next() {
  const Byte* bytes = nullptr;
  if (!queue_.empty()) {
    out_ = std::move(queue_.front());
    queue_.pop_front();
    bytes = out_.data.get();
  } else if (!payloads_out_.empty()) {
    const Payload& payload = payloads_out_.front();
    out_ = Outgoing{header(PointToPointType::kPiece, payload.id), nullptr};
    out_.header.length =
        static_cast<uint32_t>(std::min(payload.entry->bytes - payload.moved, sender_.best_message_bytes()));
    bytes = payload.entry->buffers[0].in + payload.moved;
  } else if (closed_ && !said_bye_) {
    said_bye_ = true;
    out_ = Outgoing{header(PointToPointType::kBye, 0), nullptr};
  } else {
    return false;
  }
  out_bytes_[0] = Piece{bytes, nullptr, out_.header.length};
  out_at_ = Cursor(out_bytes_, 0);
  sender_.start(&out_.header, sizeof out_.header);
  sending_ = true;
  return true;
}

void PeerLink::end_message() {
  sending_ = false;
  if (out_.header.type != PointToPointType::kPiece) return;
  Payload& payload = payloads_out_.front();
  payload.moved += out_.header.length;
  if (payload.moved < payload.entry->bytes) return;
  Entry* entry = payload.entry;
  payloads_out_.pop_front();
  listener_.on_moved(entry);
}

// ---- receiving ----

bool PeerLink::receive_some() {
  bool moved = false;
  look_again_ = false;
  for (int i = 0; i < kMostAtOnce; ++i) {
    if (ended_) return moved;
    if (!receiving_) {
      if (!receiver_.take_header(&in_, sizeof in_)) return moved;
      moved = receiving_ = true;
      begin_message();
    }
    const bool announcement = in_.type == PointToPointType::kAnnounce;
    if (announcement ? !take_announcement() : in_.length > 0 && !take_payload(&moved)) return moved;
    moved = true;
    receiving_ = false;
  }
  look_again_ = true;
  return moved;
}

// A header has come.
void PeerLink::begin_message() {
  if (in_.magic != kMagic || in_.epoch != epoch_) report_nonsense("not the header of a message");
  if (in_.type != PointToPointType::kAnnounce && in_.type != PointToPointType::kPiece && in_.length != 0)
    report_nonsense("a header with bytes behind it");
  switch (in_.type) {
    case PointToPointType::kAnnounce:
      if (in_.id != heard_of_ + 1 || in_.tag < 0) report_nonsense("an announcement out of order");
      if (in_.length != 0 && (in_.length != in_.bytes || in_.bytes > kMostEager))
        report_nonsense("an announcement with a part of its message");
      ++heard_of_;
      return;
    case PointToPointType::kGo:
    case PointToPointType::kRefuse:
      return on_answer();
    case PointToPointType::kPiece: {
      if (payloads_in_.empty() || payloads_in_.front().id != in_.id)
        report_nonsense("a piece of a message that was not to go");
      const Payload& payload = payloads_in_.front();
      if (in_.length == 0 || in_.length > kMaxMessage || in_.length > payload.entry->bytes - payload.moved)
        report_nonsense("a piece larger than what is left");
      in_bytes_[0] = Piece{nullptr, payload.entry->buffers[0].out + payload.moved, in_.length};
      in_at_ = Cursor(in_bytes_, 0);
      receiver_.start();
      return;
    }
    case PointToPointType::kBye:
      return on_bye();
  }
  report_nonsense("a message of an unknown type");
}

bool PeerLink::take_announcement() {
  Announcement message{in_.id, in_.tag, in_.bytes, in_.length == in_.bytes, ConstSpan()};
  if (in_.length > 0) {
    message.data = receiver_.whole(in_.length);
    if (!message.data) return false;
  }
  if (!closed_) listener_.on_announced(*this, message);
  if (in_.length > 0) receiver_.release(in_.length);
  return true;
}

bool PeerLink::take_payload(bool* moved) {
  const Moved now = receiver_.receive(in_.length, &in_at_, false);
  *moved |= now != Moved::kNothing;
  if (now != Moved::kAll) return false;
  Payload& payload = payloads_in_.front();
  payload.moved += in_.length;
  if (payload.moved < payload.entry->bytes) return true;
  Entry* entry = payload.entry;
  payloads_in_.pop_front();
  listener_.on_moved(entry);
  return true;
}

void PeerLink::on_answer() {
  const auto found = unanswered_.find(in_.id);
  if (found == unanswered_.end()) report_nonsense("an answer to a message that does not wait for one");
  const Unanswered answered = found->second;
  // Too late: to our goodbye, which is on its way, the peer answers with its own, which ends the message on both ranks.
  if (in_.type == PointToPointType::kGo && !answered.whole && said_bye_) return;
  unanswered_.erase(found);
  eager_ -= answered.eager;
  if (in_.type == PointToPointType::kRefuse) return listener_.on_refused(*this, answered.send, in_.bytes);
  listener_.on_accepted(answered.send);
  if (answered.whole) listener_.on_moved(answered.send);
  else payloads_out_.push_back(Payload{in_.id, answered.send, 0});
}

// ---- the end ----

void PeerLink::on_bye() {
  ended_ = closed_ = true;
  std::vector<Entry*> unfinished;
  for (const auto& [id, unanswered] : unanswered_) unfinished.push_back(unanswered.send);
  for (const Payload& payload : payloads_in_) unfinished.push_back(payload.entry);
  unanswered_.clear();
  payloads_in_.clear();
  listener_.on_bye(*this, unfinished);
}

void PeerLink::on_left() {
  std::vector<Entry*> untaken;
  for (const Payload& payload : payloads_out_) untaken.push_back(payload.entry);
  payloads_out_.clear();
  queue_.clear();
  sending_ = false;
  left_ = true;
  if (!untaken.empty()) listener_.on_bye(*this, untaken);
  if (!made_by_peer_ && !ended_) on_bye();
}

void PeerLink::report_nonsense(const char* why) const {
  fail(ErrorKind::kIo, "[p2p] rank " + std::to_string(peer_) + " sent " + why + " (type " +
                           std::to_string(static_cast<uint32_t>(in_.type)) + ", message " + std::to_string(in_.id) +
                           ", tag " + std::to_string(in_.tag) + ", " + std::to_string(in_.length) + " of " +
                           std::to_string(in_.bytes) + " bytes): is it a rank of this job and of this Perseus?");
}

}  // namespace perseus

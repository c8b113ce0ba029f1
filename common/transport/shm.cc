// Ranks of one host: rings in memfd segments passed over authenticated abstract UNIX sockets, which also carry control
// messages and report a peer's death at once. Belongs to one Context's progress engine; the memory is shared with the
// peers' engines.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/log.h"
#include "base/progress_lock.h"
#include "bootstrap/store.h"
#include "net/socket.h"
#include "net/waker.h"
#include "topology/host.h"
#include "transport/shared_segment.h"
#include "transport/shm_link.h"
#include "transport/shm_message.h"
#include "transport/shm_peering.h"
#include "transport/transport.h"

namespace perseus {
namespace {

// Stands for the address of a rank that has no shared memory.
constexpr char kNoAddress[] = "-";

class ShmTransport final : public Transport {
 public:
  // Throws Error(kIo) when this process has no shared memory, or not enough of it.
  explicit ShmTransport(Waker& waker);

  // What every peer maps to know whether we live and whether we sleep.
  int page_fd() const { return page_.fd(); }
  // Those that shared memory leads to. Called once, before anything else.
  void take_peers(std::map<int, ShmPeer> peers);

  TransportKind kind() const override { return TransportKind::kShm; }
  bool reaches(int peer) const override { return peers_.count(peer) != 0; }
  Link& link(int peer, Channel channel) override PERSEUS_REQUIRES(progress_lock);
  void forget(int peer, uint32_t group) override PERSEUS_REQUIRES(progress_lock);
  void poll(bool woken) override PERSEUS_REQUIRES(progress_lock);
  void send_control_message(int peer, const std::string& text) override PERSEUS_REQUIRES(progress_lock);
  bool next_event(PeerEvent* event) override PERSEUS_REQUIRES(progress_lock);
  void send_heartbeats() override PERSEUS_REQUIRES(progress_lock) {
    state().heartbeats.fetch_add(1, std::memory_order_relaxed);
  }
  int64_t last_alive_ns(int peer) override PERSEUS_REQUIRES(progress_lock);
  uint64_t bytes_sent() const override PERSEUS_REQUIRES(progress_lock) { return sent_; }
  uint64_t bytes_received() const override PERSEUS_REQUIRES(progress_lock) { return received_; }
  uint64_t staging_bytes() const override PERSEUS_REQUIRES(progress_lock) { return staging_; }

 private:
  // What the socket had no room for yet.
  struct Unsent {
    ShmMessage message;
    ShmLink* ring;  // goes along; may be null
  };

  struct Peer {
    ShmPeer shared;
    uint64_t heartbeats = 0;
    int64_t alive_ns = 0;
    bool gone = false;
    std::map<uint64_t, std::unique_ptr<ShmLink>> links;
    std::map<uint64_t, SharedSegment> early;  // rings announced before we asked for the channel
    std::deque<Unsent> unsent;

    StatePage& state() const { return *static_cast<StatePage*>(shared.page.data()); }
    Doorbell doorbell() const { return Doorbell{&state().sleeping, shared.event_fd.fd()}; }
  };

  StatePage& state() const { return *static_cast<StatePage*>(page_.data()); }
  void send(int rank, Peer& peer, const ShmMessage& message, ShmLink* ring);
  void flush(int rank, Peer& peer);
  void drop_unsent(Peer& peer);
  void read_peer(int rank, Peer& peer);
  void take_ring(Peer& peer, const ShmMessage& message, Socket memory);

  Waker& waker_;
  SharedSegment page_{sizeof(StatePage)};
  std::map<int, Peer> peers_;
  std::deque<PeerEvent> peer_events_;
  int unconnected_ = 0;  // links whose peer's ring has not been announced yet
  size_t unsent_ = 0;    // of all peers
  uint64_t sent_ = 0, received_ = 0, staging_ = 0;
};

ShmTransport::ShmTransport(Waker& waker) : waker_(waker) {
  // Too little memory is to be known now, not in the first step of a training.
  const SharedSegment room(kRingHeaderBytes + kDataRingBytes);
}

void ShmTransport::take_peers(std::map<int, ShmPeer> peers) {
  waker_.place_flag(&state().sleeping);
  page_.close_fd();  // whoever maps it has it
  for (auto& [rank, shared] : peers) {
    Peer& peer = peers_[rank];
    peer.shared = std::move(shared);
    peer.alive_ns = now_ns();
    waker_.watch(peer.shared.socket.fd());
  }
}

Link& ShmTransport::link(int rank, Channel channel) {
  Peer& peer = peers_.at(rank);
  const auto found = peer.links.find(channel.key());
  if (found != peer.links.end()) return *found->second;
  const size_t capacity = ring_capacity(channel.stream);
  staging_ += capacity;                             // the incoming ring is the peer's
  SharedSegment ring(kRingHeaderBytes + capacity);  // may fail: then there is no link, whatever the peer announces
  ShmMessage announce;
  announce.type = ShmMessageType::kRing;
  announce.channel = channel.key();
  announce.bytes = capacity;
  auto made = std::make_unique<ShmLink>(peer.doorbell(), std::move(ring), capacity, &sent_, &received_);
  ShmLink* const link = peer.links.emplace(channel.key(), std::move(made)).first->second.get();
  send(rank, peer, announce, link);
  const auto early = peer.early.find(channel.key());
  if (early == peer.early.end()) {
    ++unconnected_;
  } else {
    link->connect(std::move(early->second));
    peer.early.erase(early);
  }
  return *link;
}

void ShmTransport::forget(int rank, uint32_t group) {
  Peer& peer = peers_.at(rank);
  const uint64_t first = Channel{group, 0}.key(), last = Channel{group, UINT32_MAX}.key();
  const auto links = peer.links.lower_bound(first), links_end = peer.links.upper_bound(last);
  for (auto link = links; link != links_end; ++link) {
    staging_ -= ring_capacity(static_cast<uint32_t>(link->first));
    unconnected_ -= link->second->connected() ? 0 : 1;
    const auto its = [&](const Unsent& unsent) { return unsent.ring == link->second.get(); };
    const auto kept = std::remove_if(peer.unsent.begin(), peer.unsent.end(), its);
    unsent_ -= static_cast<size_t>(peer.unsent.end() - kept);
    peer.unsent.erase(kept, peer.unsent.end());
  }
  peer.links.erase(links, links_end);
  peer.early.erase(peer.early.lower_bound(first), peer.early.upper_bound(last));
}

void ShmTransport::poll(bool woken) {
  if (!woken && unconnected_ == 0 && unsent_ == 0) return;
  for (auto& [rank, peer] : peers_) {
    if (!peer.unsent.empty()) flush(rank, peer);
    if (!peer.gone) read_peer(rank, peer);
  }
}

// In order, and now if the socket has room: whoever sends holds the progress lock.
void ShmTransport::send(int rank, Peer& peer, const ShmMessage& message, ShmLink* ring) {
  if (peer.gone) return;
  peer.unsent.push_back(Unsent{message, ring});
  ++unsent_;
  flush(rank, peer);
}

void ShmTransport::flush(int rank, Peer& peer) {
  while (!peer.unsent.empty()) {
    const Unsent& next = peer.unsent.front();
    const int fd = next.ring == nullptr ? -1 : next.ring->fd();
    if (!send_message(peer.shared.socket.fd(), next.message, &fd, next.ring == nullptr ? 0 : 1, MSG_DONTWAIT)) {
      if (may_be_sent_later(errno)) return;
      const int why = errno;
      const bool lost = next.ring != nullptr;
      drop_unsent(peer);
      // A dead peer shows up as gone.
      if (lost && why != EPIPE && why != ECONNRESET && why != ENOTCONN)
        fail(ErrorKind::kIo, "[shm] cannot pass memory to rank " + std::to_string(rank) + ": " + error_text(why));
      return;
    }
    if (next.ring != nullptr) next.ring->announced();
    peer.unsent.pop_front();
    --unsent_;
  }
}

void ShmTransport::drop_unsent(Peer& peer) {
  unsent_ -= peer.unsent.size();
  peer.unsent.clear();
}

void ShmTransport::read_peer(int rank, Peer& peer) {
  for (;;) {
    ShmMessage message;
    Passed passed;
    const int got = recv_message(peer.shared.socket.fd(), &message, &passed);
    if (got < 0) return;
    if (got == 0) {
      peer.gone = true;
      drop_unsent(peer);
      peer_events_.push_back(PeerEvent{rank, PeerEvent::Kind::kGone, "its process ended"});
      return;
    }
    if (message.type == ShmMessageType::kControl) {
      peer_events_.push_back(PeerEvent{rank, PeerEvent::Kind::kControlMessage, text_of(message)});
    } else if (message.type == ShmMessageType::kRing) {
      if (passed.count != 1)
        fail(ErrorKind::kIo, "[shm] cannot take the memory that rank " + std::to_string(rank) +
                                 " passed: " + (passed.refused ? error_text(EMFILE) : "its descriptor is missing"));
      take_ring(peer, message, std::move(passed.open[0]));
    }
  }
}

void ShmTransport::take_ring(Peer& peer, const ShmMessage& message, Socket memory) {
  const size_t capacity = ring_capacity(static_cast<uint32_t>(message.channel));
  SharedSegment ring(std::move(memory), kRingHeaderBytes + capacity);
  const auto link = peer.links.find(message.channel);
  if (link == peer.links.end()) {
    peer.early.emplace(message.channel, std::move(ring));
  } else {
    link->second->connect(std::move(ring));
    --unconnected_;
  }
}

void ShmTransport::send_control_message(int rank, const std::string& text) {
  const auto peer = peers_.find(rank);
  if (peer == peers_.end() || peer->second.gone) return;
  ShmMessage message;
  set_text(&message, text);
  send(rank, peer->second, message, nullptr);
}

bool ShmTransport::next_event(PeerEvent* event) {
  if (peer_events_.empty()) return false;
  *event = std::move(peer_events_.front());
  peer_events_.pop_front();
  return true;
}

int64_t ShmTransport::last_alive_ns(int rank) {
  Peer& peer = peers_.at(rank);
  const uint64_t heartbeats = peer.state().heartbeats.load(std::memory_order_relaxed);
  if (heartbeats != peer.heartbeats) {
    peer.heartbeats = heartbeats;
    peer.alive_ns = now_ns();
  }
  return peer.alive_ns;
}

// The ranks of this host, and where each listens.
std::map<int, std::string> addresses_here(const World& world, Store& store, const std::string& own_address,
                                          const ConnectOptions& options) {
  const std::string prefix = world.job + "/" + std::to_string(world.epoch) + "/shm/";
  const std::string host = host_identity();
  store.set(prefix + std::to_string(world.rank), host + " " + own_address, Store::answer_by(options.deadline_ns),
            options.interrupted);
  std::vector<int> others;
  for (int rank = 0; rank < world.size; ++rank)
    if (rank != world.rank) others.push_back(rank);
  std::map<int, std::string> addresses;
  const auto on_entry = [&](int rank, const std::string& entry) {
    const size_t space = entry.find(' ');
    if (space != std::string::npos && entry.compare(0, space, host) == 0)
      addresses.emplace(rank, entry.substr(space + 1));
  };
  const std::vector<int> missing = store.get_all(prefix, others, options.deadline_ns, on_entry, options.interrupted);
  if (!missing.empty()) report_unconnected(std::to_string(missing[0]));
  return addresses;
}

// Connects with those of `addresses` that have one; returns "", or which of them shared memory does not lead to.
std::string connect_peers(ShmPeering& peering, ShmTransport& transport, Store& store,
                          std::map<int, std::string> addresses, const ConnectOptions& options) {
  for (auto entry = addresses.begin(); entry != addresses.end();)
    entry = entry->second == kNoAddress ? addresses.erase(entry) : std::next(entry);
  std::map<int, std::string> unreachable;
  transport.take_peers(peering.connect(store, addresses, options.deadline_ns, options.interrupted, &unreachable));
  std::string text;
  for (const auto& [rank, why] : unreachable)
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (" + why + ")";
  return text.empty() ? text : "[shm] shared memory does not lead to " + text;
}

}  // namespace

std::unique_ptr<Transport> connect_shm(const World& world, Store& store, Waker& waker, const Config& config,
                                       const ConnectOptions& options) {
  const bool only = config.choice<TransportChoice>() == TransportChoice::kShm;
  const Log log(config.choice<LogLevel>(), config.flag(Var::kLogHideTime), world.rank);
  std::unique_ptr<ShmTransport> transport;
  std::unique_ptr<ShmPeering> peering;
  std::string trouble;
  ConnectOptions connecting = options;
  connecting.interrupted = [&]() PERSEUS_REQUIRES(progress_lock) {
    // Ranks that are connected to all others already watch over this one.
    if (transport) transport->send_heartbeats();
    return options.interrupted && options.interrupted();
  };
  try {
    transport = std::make_unique<ShmTransport>(waker);
    peering = std::make_unique<ShmPeering>(world, transport->page_fd(), waker.event_fd());
  } catch (const Error& error) {
    if (only) throw;
    trouble = error.what();
  }
  try {
    const std::map<int, std::string> addresses =
        addresses_here(world, store, peering ? peering->address() : kNoAddress, connecting);
    if (!peering) {
      if (!addresses.empty()) log.warning(trouble + "; this rank uses TCP inside its host, which is slower");
      return nullptr;
    }
    const std::string missed = connect_peers(*peering, *transport, store, addresses, connecting);
    if (missed.empty()) return transport;
    if (only) fail(ErrorKind::kIo, missed + ": unset PERSEUS_TRANSPORT=shm to use TCP there");
    log.warning(missed + ": TCP is used there, which is slower");
    return transport;
  } catch (const Error& error) {
    if (options.on_failure) options.on_failure(error);
    throw;
  }
}

}  // namespace perseus

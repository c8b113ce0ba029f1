// Ranks of one host: rings in memfd segments passed over authenticated abstract UNIX sockets, which also carry notices
// and report a peer's death at once. Belongs to one Context's driver; the memory is shared with the peers' drivers.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "base/clock.h"
#include "base/config.h"
#include "base/error.h"
#include "base/fork_guard.h"
#include "rendezvous/auth.h"
#include "rendezvous/store.h"
#include "transport/host.h"
#include "transport/ring.h"
#include "transport/shared_segment.h"
#include "transport/shm_message.h"
#include "transport/transport.h"
#include "transport/waker.h"

namespace perseus {
namespace {

// How long a rank that waits for another at the start may be deaf to an interruption.
constexpr int64_t kSlice = 100 * kMillisecond;

// Of each Context, visible to all its local peers.
struct StatePage {
  alignas(64) std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint64_t> beats;
};

class ShmLink final : public Link {
 public:
  ShmLink(Doorbell bell, SharedSegment out, size_t capacity, uint64_t* sent, uint64_t* received)
      : bell_(bell),
        out_memory_(std::move(out)),
        out_(out_memory_.data(), capacity),
        capacity_(capacity),
        sent_(sent),
        received_(received) {}

  bool connected() const { return in_memory_.data() != nullptr; }
  void connect(SharedSegment in) {
    in_memory_ = std::move(in);
    in_ = RingConsumer(in_memory_.data(), capacity_);
  }

  bool has_windows() const override { return true; }
  Span send_window(size_t n) override { return out_.window(n); }
  void send_commit(size_t n) override {
    out_.commit(n);
    *sent_ += n;
    bell_.ring();
  }
  ConstSpan recv_window(size_t n) override { return connected() ? in_.window(n) : ConstSpan(); }
  void recv_release(size_t n) override {
    in_.release(n);
    *received_ += n;
    bell_.ring();
  }
  size_t try_send(const iovec*, int) override { fail(ErrorKind::kInternal, "[shm] try_send on a link with windows"); }
  size_t try_recv(const iovec*, int) override { fail(ErrorKind::kInternal, "[shm] try_recv on a link with windows"); }

 private:
  Doorbell bell_;
  SharedSegment out_memory_, in_memory_;
  RingProducer out_;
  RingConsumer in_;
  size_t capacity_;
  uint64_t *sent_, *received_;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(const World& world, Store& store, Waker& waker, int64_t deadline_ns,
               const std::function<bool()>& interrupted);
  ~ShmTransport() override;

  const char* name() const override { return "shm"; }
  bool reaches(int peer) const override { return peers_.count(peer) != 0; }
  Link& link(int peer, Channel channel) override;
  void poll(bool woken) override;
  void notify(int peer, const std::string& text) override;
  bool next_notice(Notice* notice) override;
  void beat() override { state().beats.fetch_add(1, std::memory_order_relaxed); }
  int64_t last_heard_ns(int peer) override;
  uint64_t bytes_sent() const override { return sent_; }
  uint64_t bytes_received() const override { return received_; }
  uint64_t staging_bytes() const override { return staging_; }

 private:
  struct Peer {
    int socket = -1;
    int event_fd = -1;
    SharedSegment page;
    uint64_t beats = 0;
    int64_t heard_ns = 0;
    bool gone = false;
    std::map<uint64_t, std::unique_ptr<ShmLink>> links;
    std::map<uint64_t, SharedSegment> early;  // rings announced before we asked for the channel

    StatePage& state() const { return *static_cast<StatePage*>(page.data()); }
    Doorbell doorbell() const { return Doorbell{&state().sleeping, event_fd}; }
  };

  StatePage& state() const { return *static_cast<StatePage*>(page_.data()); }
  using Interrupted = std::function<bool()>;
  int listen_here();
  void meet(Store& store, int64_t deadline_ns, const Interrupted& interrupted);
  void connect_to(int rank, const std::string& address, int64_t deadline_ns);
  void accept_peer(int64_t deadline_ns);
  std::string awaited() const;
  Digest proof(const char* label, int from, int to, const std::string& address) const;
  void adopt(int rank, int socket, const int* fds, int fd_count);
  void read_peer(int rank, Peer& peer);
  void take_ring(Peer& peer, const ShmMessage& message, int fd);

  World world_;
  Waker& waker_;
  SharedSegment page_{sizeof(StatePage)};
  std::string address_;
  int listener_ = -1;
  std::set<int> expected_;  // ranks of this host that are to connect to us
  std::map<int, Peer> peers_;
  std::deque<Notice> notices_;
  int unconnected_ = 0;  // links whose peer's ring has not been announced yet
  uint64_t sent_ = 0, received_ = 0, staging_ = 0;
};

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: no file
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

void set_timeout(int fd, int64_t deadline_ns) {
  const int64_t left = std::max<int64_t>(deadline_ns - now_ns(), kMillisecond);
  timeval limit{static_cast<time_t>(left / kSecond), static_cast<suseconds_t>(left % kSecond / 1000)};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

// Until `fd` has something to read; false at the deadline.
bool wait_readable(int fd, int64_t deadline_ns, const std::function<bool()>& interrupted) {
  for (;;) {
    const int64_t left = deadline_ns - now_ns();
    pollfd entry{fd, POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(std::clamp<int64_t>(left, 0, kSlice) / kMillisecond)) > 0) return true;
    if (left <= 0) return false;
    if (interrupted && interrupted()) fail(ErrorKind::kAborted, "[shm] interrupted while connecting");
  }
}

[[noreturn]] void report_missing(const std::string& ranks) {
  fail(ErrorKind::kTimeout, "[shm] no connection with rank " + ranks + " of this host in time (" +
                                variable(Var::kStartTimeout).name + "): look at what it printed last");
}

ShmTransport::ShmTransport(const World& world, Store& store, Waker& waker, int64_t deadline_ns,
                           const Interrupted& interrupted)
    : world_(world), waker_(waker) {
  // Too little memory is to be known now, not in the first step of a training.
  {
    const SharedSegment room(kRingHeaderBytes + kDataRingBytes);
  }
  waker_.place_flag(&state().sleeping);
  listener_ = listen_here();
  meet(store, deadline_ns, interrupted);
  close_guarded(listener_);
  listener_ = -1;
}

ShmTransport::~ShmTransport() {
  close_guarded(listener_);
  for (auto& [rank, peer] : peers_) {
    close_guarded(peer.socket);
    close_guarded(peer.event_fd);
  }
}

int ShmTransport::listen_here() {
  const std::string random = random_bytes(12);
  address_ = "perseus-";
  for (unsigned char c : random) {
    constexpr char kHex[] = "0123456789abcdef";
    address_ += kHex[c >> 4];
    address_ += kHex[c & 15];
  }
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  socklen_t length;
  const sockaddr_un address = abstract_address(address_, &length);
  if (fd < 0 || bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0 || listen(fd, 512) != 0)
    fail(ErrorKind::kIo, std::string("[shm] cannot listen on a UNIX socket: ") + std::strerror(errno));
  guard_fd(fd);
  return fd;
}

void ShmTransport::meet(Store& store, int64_t deadline_ns, const Interrupted& interrupted) {
  const std::string prefix = world_.job + "/" + std::to_string(world_.epoch) + "/shm/";
  const std::string host = host_identity();
  store.set(prefix + std::to_string(world_.rank), host + " " + address_);
  std::vector<std::pair<int, std::string>> lower;
  for (int rank = 0; rank < world_.size; ++rank) {
    if (rank == world_.rank) continue;
    std::string entry;
    try {
      entry = store.get(prefix + std::to_string(rank), deadline_ns, interrupted);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      report_missing(std::to_string(rank));
    }
    const size_t space = entry.find(' ');
    if (space == std::string::npos || entry.compare(0, space, host) != 0) continue;
    if (rank < world_.rank) lower.emplace_back(rank, entry.substr(space + 1));
    else expected_.insert(rank);
  }
  // Everybody first connects downwards (a listen queue accepts for the owner), then accepts: nobody waits in a circle.
  for (const auto& [rank, address] : lower) connect_to(rank, address, deadline_ns);
  while (!expected_.empty()) {
    if (!wait_readable(listener_, deadline_ns, interrupted)) report_missing(awaited());
    accept_peer(deadline_ns);
  }
  // Lower ranks answer while they accept; now that ours are served, read their welcomes.
  for (const auto& entry : lower) {
    Peer& peer = peers_[entry.first];
    ShmMessage message;
    int fds[kMaxFds], fd_count;
    if (!wait_readable(peer.socket, deadline_ns, interrupted)) report_missing(std::to_string(entry.first));
    const int got = recv_message(peer.socket, &message, fds, &fd_count, 0);
    if (got <= 0 || message.type != ShmMessageType::kWelcome || message.rank != entry.first ||
        !digests_equal(message.proof, proof("welcome", entry.first, world_.rank, entry.second)))
      fail(ErrorKind::kIo, "[shm] rank " + std::to_string(entry.first) +
                               " did not prove that it belongs to this job (or ended while starting)");
    adopt(entry.first, peer.socket, fds, fd_count);
  }
}

Digest ShmTransport::proof(const char* label, int from, int to, const std::string& address) const {
  // The listener's random name makes a proof worthless anywhere else.
  const std::string text = std::string(label) + "|" + world_.job + "|" + std::to_string(world_.epoch) + "|" +
                           std::to_string(from) + "|" + std::to_string(to) + "|" + address;
  return hmac_sha256(world_.secret, text.data(), text.size());
}

void ShmTransport::connect_to(int rank, const std::string& name, int64_t deadline_ns) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) fail(ErrorKind::kIo, std::string("[shm] socket: ") + std::strerror(errno));
  guard_fd(fd);
  peers_[rank].socket = fd;
  set_timeout(fd, deadline_ns);
  socklen_t length;
  const sockaddr_un address = abstract_address(name.substr(0, 100), &length);
  ShmMessage hello;
  hello.type = ShmMessageType::kHello;
  hello.rank = world_.rank;
  hello.epoch = world_.epoch;
  hello.proof = proof("hello", world_.rank, rank, name);
  const int fds[2] = {page_.fd(), waker_.event_fd()};
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0 || !send_message(fd, hello, fds, 2, 0))
    fail(ErrorKind::kIo, "[shm] cannot reach rank " + std::to_string(rank) + " on this host: " + std::strerror(errno));
}

std::string ShmTransport::awaited() const {
  std::string ranks;
  for (int rank : expected_) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks;
}

// Somebody knocks.
void ShmTransport::accept_peer(int64_t deadline_ns) {
  const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno == EINTR || errno == ECONNABORTED) return;
    fail(ErrorKind::kIo, std::string("[shm] cannot accept a rank of this host: ") + std::strerror(errno));
  }
  guard_fd(fd);
  set_timeout(fd, std::min(deadline_ns, now_ns() + 5 * kSecond));  // a stranger gets no more of our attention
  ShmMessage hello;
  int fds[kMaxFds], fd_count = 0;
  const int got = recv_message(fd, &hello, fds, &fd_count, 0);
  const bool good = got > 0 && hello.type == ShmMessageType::kHello && hello.epoch == world_.epoch &&
                    expected_.count(hello.rank) != 0 &&
                    digests_equal(hello.proof, proof("hello", hello.rank, world_.rank, address_));
  if (!good) {
    for (int i = 0; i < fd_count; ++i) ::close(fds[i]);
    close_guarded(fd);
    return;
  }
  ShmMessage welcome;
  welcome.type = ShmMessageType::kWelcome;
  welcome.rank = world_.rank;
  welcome.epoch = world_.epoch;
  welcome.proof = proof("welcome", world_.rank, hello.rank, address_);
  const int ours[2] = {page_.fd(), waker_.event_fd()};
  if (!send_message(fd, welcome, ours, 2, 0))
    fail(ErrorKind::kIo, "[shm] rank " + std::to_string(hello.rank) + " ended while starting");
  adopt(hello.rank, fd, fds, fd_count);
  expected_.erase(hello.rank);
}

void ShmTransport::adopt(int rank, int socket, const int* fds, int fd_count) {
  if (fd_count != 2) fail(ErrorKind::kIo, "[shm] rank " + std::to_string(rank) + " passed no memory");
  Peer& peer = peers_[rank];
  peer.socket = socket;
  peer.event_fd = fds[1];
  guard_fd(peer.event_fd);
  peer.page = SharedSegment(fds[0], sizeof(StatePage));
  peer.heard_ns = now_ns();
  waker_.watch(socket);
}

Link& ShmTransport::link(int rank, Channel channel) {
  Peer& peer = peers_.at(rank);
  std::unique_ptr<ShmLink>& link = peer.links[channel.key()];
  if (link) return *link;
  const size_t capacity = ring_capacity(channel.stream);
  staging_ += capacity;  // the incoming ring is the peer's
  SharedSegment ring(kRingHeaderBytes + capacity);
  ShmMessage announce;
  announce.type = ShmMessageType::kRing;
  announce.rank = world_.rank;
  announce.channel = channel.key();
  announce.bytes = capacity;
  const int fd = ring.fd();
  link = std::make_unique<ShmLink>(peer.doorbell(), std::move(ring), capacity, &sent_, &received_);
  // Waits at most for the peer's socket buffer, which is empty but for notices. A dead peer shows up as gone.
  send_message(peer.socket, announce, &fd, 1, 0);
  const auto early = peer.early.find(channel.key());
  if (early == peer.early.end()) {
    ++unconnected_;
  } else {
    link->connect(std::move(early->second));
    peer.early.erase(early);
  }
  return *link;
}

void ShmTransport::poll(bool woken) {
  if (!woken && unconnected_ == 0) return;
  for (auto& [rank, peer] : peers_)
    if (!peer.gone) read_peer(rank, peer);
}

void ShmTransport::read_peer(int rank, Peer& peer) {
  for (;;) {
    ShmMessage message;
    int fds[kMaxFds], fd_count;
    const int got = recv_message(peer.socket, &message, fds, &fd_count, MSG_DONTWAIT);
    if (got < 0) return;
    if (got == 0) {
      peer.gone = true;
      notices_.push_back(Notice{rank, Notice::Kind::kGone, "its process ended"});
      return;
    }
    if (message.type == ShmMessageType::kNotice) {
      notices_.push_back(Notice{rank, Notice::Kind::kMessage, std::string(message.text, message.bytes)});
    } else if (message.type == ShmMessageType::kRing && fd_count == 1) {
      take_ring(peer, message, fds[0]);
    }
  }
}

void ShmTransport::take_ring(Peer& peer, const ShmMessage& message, int fd) {
  const size_t capacity = ring_capacity(static_cast<uint32_t>(message.channel));
  SharedSegment ring(fd, kRingHeaderBytes + capacity);
  const auto link = peer.links.find(message.channel);
  if (link == peer.links.end()) {
    peer.early.emplace(message.channel, std::move(ring));
  } else {
    link->second->connect(std::move(ring));
    --unconnected_;
  }
}

void ShmTransport::notify(int rank, const std::string& text) {
  const auto peer = peers_.find(rank);
  if (peer == peers_.end() || peer->second.gone) return;
  ShmMessage message;
  message.rank = world_.rank;
  message.bytes = std::min(text.size(), kMaxNotice);
  std::memcpy(message.text, text.data(), message.bytes);
  send_message(peer->second.socket, message, nullptr, 0, MSG_DONTWAIT);
}

bool ShmTransport::next_notice(Notice* notice) {
  if (notices_.empty()) return false;
  *notice = std::move(notices_.front());
  notices_.pop_front();
  return true;
}

int64_t ShmTransport::last_heard_ns(int rank) {
  Peer& peer = peers_.at(rank);
  const uint64_t beats = peer.state().beats.load(std::memory_order_relaxed);
  if (beats != peer.beats) {
    peer.beats = beats;
    peer.heard_ns = now_ns();
  }
  return peer.heard_ns;
}

}  // namespace

std::unique_ptr<Transport> connect_shm(const World& world, Store& store, Waker& waker, const Config&,
                                       int64_t deadline_ns, const std::function<bool()>& interrupted) {
  return std::make_unique<ShmTransport>(world, store, waker, deadline_ns, interrupted);
}

}  // namespace perseus

// Ranks of one host: rings in memfd segments passed over authenticated abstract UNIX sockets, which also carry control
// messages and report a peer's death at once. Belongs to one Context's progress engine; the memory is shared with the
// peers' engines.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/log.h"
#include "bootstrap/store.h"
#include "net/auth.h"
#include "net/handshake.h"
#include "net/pending_connections.h"
#include "net/poller.h"
#include "net/socket.h"
#include "net/waker.h"
#include "topology/host.h"
#include "transport/ring.h"
#include "transport/shared_segment.h"
#include "transport/shm_message.h"
#include "transport/transport.h"

namespace perseus {
namespace {

// Connections that have not said who they are: of ranks, between their connect and their hello, and of anybody.
constexpr size_t kMostPending = 128;
constexpr int64_t kTryAgain = 5 * kMillisecond;
// Stands for the address of a rank that has no shared memory.
constexpr char kNoAddress[] = "-";

// Of each Context, visible to all its local peers.
struct StatePage {
  alignas(64) std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint64_t> heartbeats;
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

  // The descriptor to send to the peer, until it is announced().
  int fd() const { return out_memory_.fd(); }
  void announced() { out_memory_.close_fd(); }

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
  using Interrupted = std::function<bool()>;

  // Throws Error(kIo) when this process has no shared memory, or not enough of it.
  ShmTransport(const World& world, Waker& waker);

  // Where peers meet this rank; meet() connects to all `neighbours`, the other ranks of this host and their addresses,
  // and returns which of them cannot be reached so, and why.
  const std::string& address() const { return address_; }
  std::map<int, std::string> meet(Store& store, const std::map<int, std::string>& neighbours, int64_t deadline_ns,
                                  const Interrupted& interrupted);

  TransportKind kind() const override { return TransportKind::kShm; }
  bool reaches(int peer) const override { return peers_.count(peer) != 0; }
  Link& link(int peer, Channel channel) override;
  void poll(bool woken) override;
  void send_control_message(int peer, const std::string& text) override;
  bool next_event(PeerEvent* event) override;
  void send_heartbeats() override { state().heartbeats.fetch_add(1, std::memory_order_relaxed); }
  int64_t last_alive_ns(int peer) override;
  uint64_t bytes_sent() const override { return sent_; }
  uint64_t bytes_received() const override { return received_; }
  uint64_t staging_bytes() const override { return staging_; }

 private:
  // What the socket had no room for yet.
  struct Unsent {
    ShmMessage message;
    ShmLink* ring;  // goes along; may be null
  };

  struct Peer {
    Socket socket;
    std::unique_ptr<Handshake> handshake;  // with a lower rank, until it welcomes us
    Socket event_fd;
    SharedSegment page;
    uint64_t heartbeats = 0;
    int64_t alive_ns = 0;
    bool gone = false;
    std::map<uint64_t, std::unique_ptr<ShmLink>> links;
    std::map<uint64_t, SharedSegment> early;  // rings announced before we asked for the channel
    std::deque<Unsent> unsent;

    StatePage& state() const { return *static_cast<StatePage*>(page.data()); }
    Doorbell doorbell() const { return Doorbell{&state().sleeping, event_fd.fd()}; }
  };

  StatePage& state() const { return *static_cast<StatePage*>(page_.data()); }
  void listen_here();
  std::string connect_to(int rank, const std::string& address, const std::function<void()>& wait_a_little);
  void serve();
  void serve_pending();
  bool on_hello(Socket& socket);
  void await_welcome(int rank, int64_t deadline_ns, const Interrupted& interrupted);
  std::string awaited() const;
  Opening opening_of(int rank) const;
  void adopt(int rank, const int* fds, int fd_count);
  void send(int rank, Peer& peer, const ShmMessage& message, ShmLink* ring);
  void flush(int rank, Peer& peer);
  void forget_unsent(Peer& peer);
  void read_peer(int rank, Peer& peer);
  void take_ring(Peer& peer, const ShmMessage& message, int fd);

  World world_;
  Waker& waker_;
  SharedSegment page_{sizeof(StatePage)};
  std::string address_;
  Socket listener_;
  PendingConnections<Socket> pending_{{kMostPending}};
  std::set<int> expected_;  // ranks of this host that are to connect to us
  std::map<int, Peer> peers_;
  std::deque<PeerEvent> peer_events_;
  int unconnected_ = 0;  // links whose peer's ring has not been announced yet
  size_t unsent_ = 0;    // of all peers
  uint64_t sent_ = 0, received_ = 0, staging_ = 0;
};

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: no file
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// Does the process at the other end of a connection run as the user we run as?
bool same_user(int fd) {
  ucred other{};
  socklen_t size = sizeof other;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &other, &size) == 0 && other.uid == geteuid();
}

// Until `fd` has something to read; false at the deadline.
bool wait_readable(int fd, int64_t deadline_ns, const std::function<bool()>& interrupted) {
  const Wait outcome = wait_for(fd, POLLIN, deadline_ns, interrupted);
  if (outcome == Wait::kInterrupted) fail(ErrorKind::kAborted, "[shm] interrupted while connecting");
  return outcome == Wait::kReady;
}

[[noreturn]] void report_missing(const std::string& ranks) {
  fail(ErrorKind::kTimeout, "[shm] no connection with rank " + ranks + " of this host in time (" +
                                variable(Var::kStartTimeout).name + "): look at what it printed last");
}

ShmTransport::ShmTransport(const World& world, Waker& waker) : world_(world), waker_(waker) {
  // Too little memory is to be known now, not in the first step of a training.
  {
    const SharedSegment room(kRingHeaderBytes + kDataRingBytes);
  }
  waker_.place_flag(&state().sleeping);
  listen_here();
}

void ShmTransport::listen_here() {
  const std::string random = random_bytes(12);
  address_ = "perseus-";
  for (unsigned char c : random) {
    constexpr char kHex[] = "0123456789abcdef";
    address_ += kHex[c >> 4];
    address_ += kHex[c & 15];
  }
  listener_ = Socket(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  socklen_t length;
  const sockaddr_un address = abstract_address(address_, &length);
  if (!listener_ || bind(listener_.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener_.fd(), 512) != 0)
    fail(ErrorKind::kIo, "[shm] cannot listen on a UNIX socket: " + error_text(errno));
}

std::map<int, std::string> ShmTransport::meet(Store& store, const std::map<int, std::string>& neighbours,
                                              int64_t deadline_ns, const Interrupted& interrupted) {
  std::map<int, std::string> unreachable;
  for (const auto& [rank, address] : neighbours)
    if (rank > world_.rank) expected_.insert(rank);
  // Connects downwards and serves who connects from above meanwhile: nobody waits in a circle.
  const auto serve_meanwhile = [&] {
    serve();
    return interrupted && interrupted();
  };
  std::string missed = " ";
  for (const auto& [rank, address] : neighbours) {
    if (rank > world_.rank) break;
    const int lower = rank;
    const std::string why = connect_to(rank, address, [&] {
      if (now_ns() >= deadline_ns) report_missing(std::to_string(lower));
      if (serve_meanwhile()) fail(ErrorKind::kAborted, "[shm] interrupted while connecting");
      timespec pause{0, kTryAgain};
      nanosleep(&pause, nullptr);
    });
    if (why.empty()) continue;
    unreachable[rank] = why;
    missed += std::to_string(rank) + " ";
    peers_.erase(rank);
  }
  // Whoever has said this has connected, and its hello is here; whom it cannot reach need not wait for it.
  const std::string prefix = world_.job + "/" + std::to_string(world_.epoch) + "/shm/met/";
  store.set(prefix + std::to_string(world_.rank), missed);
  std::vector<int> higher;
  for (const auto& [rank, address] : neighbours)
    if (rank > world_.rank) higher.push_back(rank);
  const auto on_met = [&](int rank, const std::string& met) {
    if (met.find(" " + std::to_string(world_.rank) + " ") != std::string::npos) expected_.erase(rank);
  };
  const std::vector<int> missing = store.get_all(prefix, higher, deadline_ns, on_met, serve_meanwhile);
  if (!missing.empty()) report_missing(std::to_string(missing[0]));
  for (serve(); !expected_.empty(); serve())
    if (!wait_readable(listener_.fd(), deadline_ns, interrupted)) report_missing(awaited());
  pending_.clear();
  listener_.reset();
  for (const auto& [rank, address] : neighbours)
    if (rank < world_.rank && unreachable.count(rank) == 0) await_welcome(rank, deadline_ns, interrupted);
  page_.close_fd();
  return unreachable;
}

Opening ShmTransport::opening_of(int rank) const {
  return Opening{kShmMagic, kShmFormat, world_.version, world_.epoch, rank, 0, ""};
}

// Both ends of a socket know its random name, so nobody has to be asked for the listener's opening.
std::string nonce_of(const std::string& address) { return bytes_of(sha256(address.data(), address.size())); }

// Returns why shared memory does not lead to this rank, though it lives; throws when it seems to be dead.
std::string ShmTransport::connect_to(int rank, const std::string& name, const std::function<void()>& wait_a_little) {
  Socket& to = peers_[rank].socket;
  to = Socket(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!to) fail(ErrorKind::kIo, "[shm] socket: " + error_text(errno));
  socklen_t length;
  const sockaddr_un address = abstract_address(name.substr(0, 100), &length);
  const std::string who = "[shm] cannot reach rank " + std::to_string(rank) + " on this host: ";
  while (connect(to.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    // The kernel, or a security module, forbids it.
    if (errno == EPERM || errno == EACCES) return error_text(errno);
    if (errno != EAGAIN && errno != EINTR) fail(ErrorKind::kIo, who + error_text(errno));
    wait_a_little();  // its queue is full
  }
  if (!same_user(to.fd())) return "it runs as another user";
  auto& handshake = peers_[rank].handshake;
  handshake =
      std::make_unique<Handshake>(Handshake::Side::kConnector, world_.secret, world_.job, opening_of(world_.rank));
  Opening theirs = opening_of(rank);
  theirs.nonce = nonce_of(name);
  const std::string bytes = theirs.encode();
  ShmMessage hello;
  hello.type = ShmMessageType::kHello;
  set_text(&hello, handshake->feed(bytes.data(), bytes.size()));
  const int fds[2] = {page_.fd(), waker_.event_fd()};
  if (!send_message(to.fd(), hello, fds, 2, MSG_DONTWAIT)) fail(ErrorKind::kIo, who + error_text(errno));
  return "";
}

// Lower ranks answer while they accept.
void ShmTransport::await_welcome(int rank, int64_t deadline_ns, const Interrupted& interrupted) {
  const int socket = peers_[rank].socket.fd();
  const std::unique_ptr<Handshake> handshake = std::move(peers_[rank].handshake);
  ShmMessage message;
  int fds[kMaxFds], fd_count;
  if (!wait_readable(socket, deadline_ns, interrupted)) report_missing(std::to_string(rank));
  const int got = recv_message(socket, &message, fds, &fd_count, 0);
  if (got > 0 && message.type == ShmMessageType::kWelcome) handshake->feed(message.text, message.bytes);
  if (!handshake->proven()) {
    for (int i = 0; i < fd_count; ++i) ::close(fds[i]);
    fail(ErrorKind::kIo,
         "[shm] rank " + std::to_string(rank) + " did not prove that it belongs to this job (or ended while starting)");
  }
  adopt(rank, fds, fd_count);
}

std::string ShmTransport::awaited() const {
  std::string ranks;
  for (int rank : expected_) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks;
}

// Looks at whoever has connected, without waiting for anybody.
void ShmTransport::serve() {
  for (;;) {
    Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) break;
      const int why = errno;
      if (!pending_.take_oldest()) fail(ErrorKind::kIo, "[shm] cannot accept a rank of this host: " + error_text(why));
      continue;
    }
    // Of many ranks, most have said hello before they are accepted; they must not push each other out.
    if (!same_user(socket.fd()) || on_hello(socket)) continue;
    const int64_t now = now_ns();
    if (pending_.room(now) == decltype(pending_)::Room::kOldestMakesWay) serve_pending();
    if (pending_.room(now) == decltype(pending_)::Room::kOldestMakesWay) pending_.take_oldest();
    pending_.add(std::move(socket), now);
  }
  serve_pending();
}

void ShmTransport::serve_pending() {
  pending_.keep_if([this](Socket& socket) { return !on_hello(socket); });
}

// False when nothing has arrived yet. Else the connection belongs to a peer now, or leads to nobody and is closed.
bool ShmTransport::on_hello(Socket& socket) {
  ShmMessage hello;
  int fds[kMaxFds], fd_count = 0;
  const int got = recv_message(socket.fd(), &hello, fds, &fd_count, MSG_DONTWAIT);
  if (got < 0) return false;
  Opening ours = opening_of(world_.rank);
  ours.nonce = nonce_of(address_);
  Handshake handshake(
      Handshake::Side::kListener, world_.secret, world_.job, ours, Versions::kSame,
      [this](const Opening& theirs) { return expected_.count(theirs.rank) == 0 ? "not expected" : ""; });
  handshake.open();  // what the connector has from the store
  ShmMessage welcome;
  welcome.type = ShmMessageType::kWelcome;
  if (got > 0 && hello.type == ShmMessageType::kHello) set_text(&welcome, handshake.feed(hello.text, hello.bytes));
  if (!handshake.proven()) {
    for (int i = 0; i < fd_count; ++i) ::close(fds[i]);
    return true;
  }
  const int rank = handshake.theirs().rank;
  const int own_fds[2] = {page_.fd(), waker_.event_fd()};
  peers_[rank].socket = std::move(socket);
  adopt(rank, fds, fd_count);
  if (!send_message(peers_[rank].socket.fd(), welcome, own_fds, 2, MSG_DONTWAIT))
    fail(ErrorKind::kIo, "[shm] rank " + std::to_string(rank) + " ended while starting");
  expected_.erase(rank);
  return true;
}

void ShmTransport::adopt(int rank, const int* fds, int fd_count) {
  if (fd_count < 0)
    fail(ErrorKind::kIo, "[shm] cannot take what rank " + std::to_string(rank) + " passed: " + error_text(EMFILE));
  if (fd_count != 2) {
    for (int i = 0; i < fd_count; ++i) ::close(fds[i]);
    fail(ErrorKind::kIo, "[shm] rank " + std::to_string(rank) + " passed no memory");
  }
  Peer& peer = peers_[rank];
  peer.event_fd = Socket(fds[1]);
  peer.page = SharedSegment(fds[0], sizeof(StatePage));
  peer.alive_ns = now_ns();
  waker_.watch(peer.socket.fd());
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
  std::unique_ptr<ShmLink>& link = peer.links[channel.key()];
  link = std::make_unique<ShmLink>(peer.doorbell(), std::move(ring), capacity, &sent_, &received_);
  send(rank, peer, announce, link.get());
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
    if (!send_message(peer.socket.fd(), next.message, &fd, next.ring == nullptr ? 0 : 1, MSG_DONTWAIT)) {
      // ETOOMANYREFS: others have not taken yet what is on its way to them.
      if (errno == EAGAIN || errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS) return;
      const int why = errno;
      const bool lost = next.ring != nullptr;
      forget_unsent(peer);
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

void ShmTransport::forget_unsent(Peer& peer) {
  unsent_ -= peer.unsent.size();
  peer.unsent.clear();
}

void ShmTransport::read_peer(int rank, Peer& peer) {
  for (;;) {
    ShmMessage message;
    int fds[kMaxFds], fd_count;
    const int got = recv_message(peer.socket.fd(), &message, fds, &fd_count, MSG_DONTWAIT);
    if (got < 0) return;
    if (got == 0) {
      peer.gone = true;
      forget_unsent(peer);
      peer_events_.push_back(PeerEvent{rank, PeerEvent::Kind::kGone, "its process ended"});
      return;
    }
    if (message.type == ShmMessageType::kControl) {
      peer_events_.push_back(PeerEvent{rank, PeerEvent::Kind::kControlMessage, text_of(message)});
    } else if (message.type == ShmMessageType::kRing) {
      if (fd_count != 1)
        fail(ErrorKind::kIo, "[shm] cannot take the memory that rank " + std::to_string(rank) +
                                 " passed: " + (fd_count < 0 ? error_text(EMFILE) : "its descriptor is missing"));
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

}  // namespace

std::unique_ptr<Transport> connect_shm(const World& world, Store& store, Waker& waker, const Config& config,
                                       int64_t deadline_ns, const std::function<bool()>& interrupted) {
  const bool only = config.choice<TransportChoice>() == TransportChoice::kShm;
  const Log log(config.choice<LogLevel>(), config.flag(Var::kLogHideTime), world.rank);
  std::unique_ptr<ShmTransport> transport;
  std::string trouble;
  try {
    transport = std::make_unique<ShmTransport>(world, waker);
  } catch (const Error& error) {
    if (only) throw;
    trouble = error.what();
  }
  const std::string prefix = world.job + "/" + std::to_string(world.epoch) + "/shm/";
  const std::string host = host_identity();
  store.set(prefix + std::to_string(world.rank), host + " " + (transport ? transport->address() : kNoAddress));
  std::vector<int> others;
  for (int rank = 0; rank < world.size; ++rank)
    if (rank != world.rank) others.push_back(rank);
  std::map<int, std::string> neighbours;
  bool alone = true;
  const auto on_entry = [&](int rank, const std::string& entry) {
    const size_t space = entry.find(' ');
    if (space == std::string::npos || entry.compare(0, space, host) != 0) return;
    alone = false;
    const std::string address = entry.substr(space + 1);
    if (address != kNoAddress) neighbours.emplace(rank, address);
  };
  const std::vector<int> missing = store.get_all(prefix, others, deadline_ns, on_entry, interrupted);
  if (!missing.empty()) report_missing(std::to_string(missing[0]));
  if (!transport) {
    if (!alone) log.warning(trouble + "; this rank uses TCP inside its host, which is slower");
    return nullptr;
  }
  std::string unreachable;
  for (const auto& [rank, why] : transport->meet(store, neighbours, deadline_ns, interrupted))
    unreachable += (unreachable.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (" + why + ")";
  if (!unreachable.empty()) {
    const std::string text = "[shm] shared memory does not lead to " + unreachable;
    if (only) fail(ErrorKind::kIo, text + ": unset PERSEUS_TRANSPORT=shm to use TCP there");
    log.warning(text + ": TCP is used there, which is slower");
  }
  return transport;
}

}  // namespace perseus

#include "transport/shm_peering.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "net/auth.h"
#include "net/poller.h"
#include "transport/shm_message.h"

namespace perseus {
namespace {

// Connections of anybody that have not said who they are, beside those of ranks between their connect and their hello.
constexpr size_t kMostPending = 128;
constexpr int64_t kTryAgain = 5 * kMillisecond;

sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: no file
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Socket open_unix_socket() {
  return Socket([] { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
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

// Both ends of a socket know its random name, so nobody has to be asked for the listener's opening.
std::string nonce_of(const std::string& address) { return bytes_of(sha256(address.data(), address.size())); }

}  // namespace

void report_unconnected(const std::string& ranks, const std::string& remedy) {
  fail(ErrorKind::kTimeout, "[shm] no connection with rank " + ranks + " of this host in time (" +
                                variable(Var::kStartTimeout).name + "): " + remedy);
}

ShmPeering::ShmPeering(const World& world, int page_fd, int event_fd)
    : world_(world), page_fd_(page_fd), event_fd_(event_fd), pending_({kMostPending}) {
  listen();
}

void ShmPeering::listen() {
  const std::string random = random_bytes(12);
  address_ = "perseus-";
  for (unsigned char c : random) {
    constexpr char kHex[] = "0123456789abcdef";
    address_ += kHex[c >> 4];
    address_ += kHex[c & 15];
  }
  listener_ = open_unix_socket();
  socklen_t length;
  const sockaddr_un address = abstract_address(address_, &length);
  if (!listener_ || bind(listener_.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener_.fd(), 512) != 0)
    fail(ErrorKind::kIo, "[shm] cannot listen on a UNIX socket: " + error_text(errno));
}

std::map<int, ShmPeer> ShmPeering::connect(Store& store, const std::map<int, std::string>& neighbours,
                                           int64_t deadline_ns, const Interrupted& interrupted,
                                           std::map<int, std::string>* unreachable) {
  try {
    return connect_all(store, neighbours, deadline_ns, interrupted, unreachable);
  } catch (const Error& error) {
    if (shortages_.empty() || (error.kind() != ErrorKind::kIo && error.kind() != ErrorKind::kAborted)) throw;
    // Whoever waits for what we cannot pass may lose patience before us, and only we know why it had to wait.
    fail(error.kind(), std::string(error.what()) + "; " + unpassed());
  }
}

std::map<int, ShmPeer> ShmPeering::connect_all(Store& store, const std::map<int, std::string>& neighbours,
                                               int64_t deadline_ns, const Interrupted& interrupted,
                                               std::map<int, std::string>* unreachable) {
  for (const auto& [rank, address] : neighbours)
    if (rank > world_.rank) expected_.insert(rank);
  pending_.set_most(kMostPending + expected_.size());
  // Connects downwards and serves who connects from above meanwhile: nobody waits in a circle.
  std::string missed = " ";
  for (const auto& [rank, address] : neighbours) {
    if (rank > world_.rank) break;
    const int lower = rank;
    const std::string why = connect_to(rank, address, [&] {
      if (now_ns() >= deadline_ns) report_missing(std::to_string(lower));
      serve();
      if (interrupted && interrupted()) fail(ErrorKind::kAborted, "[shm] interrupted while connecting");
      timespec pause{0, kTryAgain};
      nanosleep(&pause, nullptr);
    });
    if (why.empty()) continue;
    (*unreachable)[rank] = why;
    missed += std::to_string(rank) + " ";
    peers_.erase(rank);
  }
  await_higher(store, neighbours, missed, deadline_ns, interrupted);
  pending_.clear();
  listener_.reset();
  await_welcomes(deadline_ns, interrupted);
  return std::move(peers_);
}

// Until those that can reach us have connected. Whoever has told the store whom it missed has connected to all others,
// and its hello is here; whom it missed need not wait for it.
void ShmPeering::await_higher(Store& store, const std::map<int, std::string>& neighbours, const std::string& missed,
                              int64_t deadline_ns, const Interrupted& interrupted) {
  const std::string prefix = world_.job + "/" + std::to_string(world_.epoch) + "/shm/met/";
  store.set(prefix + std::to_string(world_.rank), missed, Store::answer_by(deadline_ns), interrupted);
  std::vector<int> higher;
  for (const auto& [rank, address] : neighbours)
    if (rank > world_.rank) higher.push_back(rank);
  const auto on_met = [&](int rank, const std::string& met) {
    if (met.find(" " + std::to_string(world_.rank) + " ") != std::string::npos) expected_.erase(rank);
  };
  const auto serve_meanwhile = [&] {
    serve();
    return interrupted && interrupted();
  };
  const std::vector<int> missing = store.get_all(prefix, higher, deadline_ns, on_met, serve_meanwhile);
  if (!missing.empty()) report_missing(std::to_string(missing[0]));
  for (serve(); !expected_.empty() || !welcomes_.empty(); serve()) {
    const int64_t until = welcomes_.empty() ? deadline_ns : std::min(deadline_ns, now_ns() + kTryAgain);
    if (wait_readable(listener_.fd(), until, interrupted) || until < deadline_ns) continue;
    report_missing(awaited());
  }
}

Opening ShmPeering::opening_of(int rank) const {
  return Opening{kShmMagic, kShmFormat, world_.version, world_.epoch, rank, 0, ""};
}

// Returns why shared memory does not lead to this rank, though it lives; throws when it seems to be dead.
std::string ShmPeering::connect_to(int rank, const std::string& name, const std::function<void()>& wait_a_little) {
  Socket& to = peers_[rank].socket;
  to = open_unix_socket();
  if (!to) fail(ErrorKind::kIo, "[shm] socket: " + error_text(errno));
  socklen_t length;
  const sockaddr_un address = abstract_address(name.substr(0, 100), &length);
  const std::string who = "[shm] cannot reach rank " + std::to_string(rank) + " on this host: ";
  while (::connect(to.fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    // The kernel, or a security module, forbids it.
    if (errno == EPERM || errno == EACCES) return error_text(errno);
    if (errno != EAGAIN && errno != EINTR) fail(ErrorKind::kIo, who + error_text(errno));
    wait_a_little();  // its queue is full
  }
  if (!same_user(to.fd())) return "it runs as another user";
  std::unique_ptr<Handshake>& handshake = proofs_[rank];
  handshake =
      std::make_unique<Handshake>(Handshake::Side::kConnector, world_.secret, world_.job, opening_of(world_.rank));
  Opening theirs = opening_of(rank);
  theirs.nonce = nonce_of(name);
  const std::string bytes = theirs.encode();
  ShmMessage hello;
  hello.type = ShmMessageType::kHello;
  set_text(&hello, handshake->feed(bytes.data(), bytes.size()));
  for (;;) {
    const Sent sent = send(rank, hello);
    if (sent == Sent::kYes) return "";
    if (sent == Sent::kNever) fail(ErrorKind::kIo, who + error_text(errno));
    wait_a_little();
  }
}

// If never, errno says why, which hides a shortage: once a peer has gone, the kernel does not look for room.
ShmPeering::Sent ShmPeering::send(int rank, const ShmMessage& message) {
  const int fds[2] = {page_fd_, event_fd_};
  if (send_message(peers_[rank].socket.fd(), message, fds, 2, MSG_DONTWAIT)) {
    shortages_.erase(rank);
    return Sent::kYes;
  }
  if (!may_be_sent_later(errno)) return Sent::kNever;
  shortages_[rank] = errno;
  return Sent::kNotYet;
}

void ShmPeering::send_welcomes() {
  for (auto entry = welcomes_.begin(); entry != welcomes_.end();) {
    const Sent sent = send(entry->first, entry->second);
    if (sent == Sent::kNotYet) return;
    if (sent == Sent::kNever)
      fail(ErrorKind::kIo, "[shm] rank " + std::to_string(entry->first) + " ended while starting");
    entry = welcomes_.erase(entry);
  }
}

// Lower ranks answer while they accept.
void ShmPeering::await_welcomes(int64_t deadline_ns, const Interrupted& interrupted) {
  for (take_welcomes(); !proofs_.empty(); take_welcomes()) {
    // For the others, too, after a while: what they have sent takes up room.
    const int rank = proofs_.begin()->first;
    const int64_t until = std::min(deadline_ns, now_ns() + kTryAgain);
    if (wait_readable(peers_[rank].socket.fd(), until, interrupted) || until < deadline_ns) continue;
    report_missing(std::to_string(rank));
  }
}

void ShmPeering::take_welcomes() {
  for (auto entry = proofs_.begin(); entry != proofs_.end();) {
    const auto& [rank, handshake] = *entry;
    ShmMessage message;
    Passed passed;
    const int got = recv_message(peers_[rank].socket.fd(), &message, &passed);
    if (got < 0) {
      ++entry;
      continue;
    }
    if (got > 0 && message.type == ShmMessageType::kWelcome) handshake->feed(message.text, message.bytes);
    if (!handshake->proven())
      fail(ErrorKind::kIo, "[shm] rank " + std::to_string(rank) +
                               " did not prove that it belongs to this job (or ended while starting)");
    adopt(rank, std::move(passed));
    entry = proofs_.erase(entry);
  }
}

std::string ShmPeering::awaited() const {
  std::set<int> ranks = expected_;
  for (const auto& [rank, welcome] : welcomes_) ranks.insert(rank);
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

void ShmPeering::report_missing(const std::string& ranks) const {
  if (shortages_.empty()) report_unconnected(ranks);
  report_unconnected(ranks, unpassed());
}

std::string ShmPeering::unpassed() const {
  std::string ranks;
  for (const auto& [rank, error] : shortages_) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return "descriptors cannot be passed to rank " + ranks + ": " + error_text(shortages_.begin()->second);
}

// Looks at whoever has connected and whoever has answered, without waiting for anybody.
void ShmPeering::serve() {
  for (;;) {
    Socket socket([this] { return accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
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
  send_welcomes();
  take_welcomes();
}

void ShmPeering::serve_pending() {
  pending_.keep_if([this](Socket& socket) { return !on_hello(socket); });
}

// False when nothing has arrived yet. Else the connection belongs to a peer now, or leads to nobody and is closed.
bool ShmPeering::on_hello(Socket& socket) {
  ShmMessage hello;
  Passed passed;
  const int got = recv_message(socket.fd(), &hello, &passed);
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
  if (!handshake.proven()) return true;
  const int rank = handshake.theirs().rank;
  peers_[rank].socket = std::move(socket);
  adopt(rank, std::move(passed));
  expected_.erase(rank);
  welcomes_[rank] = welcome;
  send_welcomes();
  return true;
}

void ShmPeering::adopt(int rank, Passed passed) {
  if (passed.refused)
    fail(ErrorKind::kIo, "[shm] cannot take what rank " + std::to_string(rank) + " passed: " + error_text(EMFILE));
  if (passed.count != 2) fail(ErrorKind::kIo, "[shm] rank " + std::to_string(rank) + " passed no memory");
  ShmPeer& peer = peers_[rank];
  peer.event_fd = std::move(passed.open[1]);
  peer.page = SharedSegment(std::move(passed.open[0]), sizeof(StatePage));
}

}  // namespace perseus

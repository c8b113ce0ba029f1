// TcpTransport after the start: links opened on demand, control messages, and how often sockets are polled.
#include "transport/tcp_transport.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/config.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "bootstrap/store.h"
#include "net/waker.h"
#include "transport/tcp_protocol.h"

namespace perseus {

using namespace tcp_protocol;

namespace {

// A progress engine that spins tries its sockets again after this time for each try of the last round that moved
// nothing, so that fruitless system calls take a bounded share of its time.
constexpr int64_t kRetryPause = 1 * kMicrosecond;
// How often to look for handshakes and control messages without an event: while connections are being made, and else.
constexpr int64_t kBusyEventsPause = 20 * kMicrosecond;
constexpr int64_t kEventsPause = 1 * kMillisecond;
constexpr int64_t kTimeCheckPause = 100 * kMillisecond;
// An interface that swallows packets must not hold a stream for the kernel's two minutes.
constexpr int64_t kConnectLimit = 10 * kSecond;
// A rank that was stopped between connecting and saying who it is finds the door closed; it may knock again.
constexpr int kMaxTries = 10;
// The engine's clocks, which know what was under way, speak first; the kernel's are for connections nobody waits for.
constexpr int kBehindClocks = 10;

// For what a rank has said last to arrive before its connections are closed: two or three retransmissions.
constexpr int64_t kLinger = 2 * kSecond, kLingerPause = kMillisecond;

// Who is alive has been heard from within this time, in which there are two heartbeats.
int64_t heard_within(const Config& config) {
  const int64_t limit = config.integer(Var::kTimeout);
  return limit == 0 ? 2 * kSecond : std::min(2 * kSecond, limit * kSecond / 2);
}

int keep_alive_seconds(const Config& config) {
  const int64_t limit = config.integer(Var::kTimeout);
  return limit == 0 ? 0 : static_cast<int>(limit) + kBehindClocks;
}

}  // namespace

// A data connection on its way to a lower rank: connecting, then waiting for the welcome.
class TcpTransport::Outgoing : public PollHandler {
 public:
  Outgoing(TcpTransport& owner, TcpLink& link, Socket socket, const std::string& where, bool striped, int tries)
      : owner_(owner), link_(link), socket_(std::move(socket)), where_(where), striped_(striped), tries_(tries) {}

  void on_event(uint32_t events) override {
    if (connected_) return on_welcome();
    const int code = connect_result(socket_.fd());
    if (code == ECONNRESET || code == EPIPE) return owner_.on_refused(this, std::strerror(code));
    if (code != 0) return owner_.on_unreachable(this, std::strerror(code));
    if ((events & EPOLLOUT) == 0) return;
    connected_ = true;
    // A fresh connection always has room for a hundred bytes.
    const std::string ticket = owner_.ticket_for(link_);
    if (send_some(socket_.fd(), ticket.data(), ticket.size()) != static_cast<ssize_t>(ticket.size()))
      return owner_.on_refused(this, "connection closed");
    owner_.traffic_.sent += ticket.size();
    owner_.poller_.change(socket_.fd(), EPOLLIN, this);
  }

 private:
  friend class TcpTransport;

  void on_welcome() {
    char welcome = 0;
    const ssize_t n = recv_some(socket_.fd(), &welcome, 1);
    if (n < 0) return owner_.on_refused(this, n == kEndOfStream ? "connection closed" : std::strerror(errno));
    if (n == 0) return;
    ++owner_.traffic_.received;
    if (welcome != kWelcome)
      return owner_.on_unreachable(this, "the process that answers there is not a rank of this job");
    owner_.on_established(this);
  }

  TcpTransport& owner_;
  TcpLink& link_;
  Socket socket_;
  const std::string where_;
  const bool striped_;
  const int tries_;
  bool connected_ = false;
  const int64_t since_ns_ = now_ns();
};

TcpTransport::TcpTransport(const World& world, Store& store, Waker& waker, const Config& config,
                           const std::vector<int>& peers, const ConnectOptions& options)
    : world_(world),
      keep_alive_s_(keep_alive_seconds(config)),
      heard_ns_(heard_within(config)),
      checked_(config.flag(Var::kChecksum)),
      waker_(waker),
      log_(config.choice<LogLevel>(), config.flag(Var::kLogHideTime), world.rank) {
  traffic_.now_ns = now_ns();
  for (const int rank : peers) peers_[rank];
  acceptor_ = std::make_unique<TcpAcceptor>(poller_, world_, *this, log_);
  open_listeners(InterfaceChoice(config));
  if (!peers_.empty())
    store.set(store_prefix() + std::to_string(world_.rank), own_.encode(), Store::answer_by(options.deadline_ns),
              options.interrupted);
  waker_.watch(poller_.fd());
}

TcpTransport::~TcpTransport() {
  linger();
  waker_.unwatch(poller_.fd());
  for (const auto& connection : outgoing_) poller_.remove(connection->socket_.fd());
  for (const auto& [rank, peer] : peers_)
    for (const auto& [key, link] : peer.links)
      if (link->attached()) waker_.unwatch(link->fd());
}

// Whatever a peer still sends to a closed socket resets the connection: then the kernel drops what has been said last,
// and not been acknowledged because a packet was lost. A connection that is closed in one direction only is not reset,
// and the end that a peer sends acknowledges ours at once.
void TcpTransport::linger() {
  const int64_t now = now_ns(), deadline = now + kLinger;
  while (!finish(now - heard_ns_) && now_ns() < deadline)
    std::this_thread::sleep_for(std::chrono::nanoseconds(kLingerPause));
}

bool TcpTransport::finish(int64_t alive_since_ns) {
  bool finished = true;
  for (const auto& [rank, peer] : peers_) {
    if (!peer.gone.empty() || !peer.side || peer.alive_ns < alive_since_ns) continue;
    finished &= peer.side->finish();
    for (const auto& [key, link] : peer.links) finished &= link->finish();
  }
  return finished;
}

TcpTransport::Peer& TcpTransport::peer_of(int rank) {
  const auto found = peers_.find(rank);
  if (found == peers_.end())
    fail(ErrorKind::kInternal, "[tcp] rank " + std::to_string(rank) + " is not reached by this transport");
  return found->second;
}

// ---- links ----

Link& TcpTransport::link(int rank, Channel channel) {
  Peer& peer = peer_of(rank);
  const auto found = peer.links.find(channel.key());
  if (found != peer.links.end()) return *found->second;
  TcpLink& made = link_of(peer, rank, channel);
  if (!peer.gone.empty()) made.break_off(peer.gone);
  else if (rank < world_.rank) connect(made, !peer.stripes.empty());
  return made;
}

void TcpTransport::forget(int rank, uint32_t group) {
  Peer& peer = peer_of(rank);
  const auto first = peer.links.lower_bound(Channel{group, 0}.key());
  const auto last = peer.links.upper_bound(Channel{group, UINT32_MAX}.key());
  for (auto at = first; at != last; ++at) {
    TcpLink& link = *at->second;
    for (size_t i = outgoing_.size(); i-- > 0;)
      if (&outgoing_[i]->link_ == &link) end(outgoing_[i].get());
    if (link.attached()) waker_.unwatch(link.fd());
    else --unattached_;
  }
  peer.links.erase(first, last);
  if (rank > world_.rank) peer.forgotten.insert(group);
}

TcpLink& TcpTransport::link_of(Peer& peer, int rank, Channel channel) {
  const auto found = peer.links.find(channel.key());
  if (found != peer.links.end()) return *found->second;
  auto link =
      std::make_unique<TcpLink>(traffic_, peer.alive_ns, rank, channel, check_of(peer, world_.rank, rank, channel),
                                check_of(peer, rank, world_.rank, channel));
  TcpLink& made = *peer.links.emplace(channel.key(), std::move(link)).first->second;
  ++unattached_;
  return made;
}

// What one rank sends to the other on the channel. Announcements decide what ranks do and are short; data take a
// checksum if the user wants one.
std::unique_ptr<MessageCheck> TcpTransport::check_of(const Peer& peer, int from, int to, Channel channel) const {
  if (channel.stream >= kControlStream) {
    // Without a control connection, the link never carries anything.
    const std::string session = peer.side ? peer.side->session() : "";
    return std::make_unique<AuthenticationCode>(message_key(session, from, to, std::to_string(channel.key())));
  }
  if (checked_) return std::make_unique<Checksum>();
  return nullptr;
}

void TcpTransport::connect(TcpLink& link, bool striped, int tries) {
  const Peer& peer = peer_of(link.peer());
  SocketAddress to = peer.address;
  const SocketAddress* from = nullptr;
  if (striped) {
    const auto& pair = peer.stripes[link.channel().stream % peer.stripes.size()];
    from = &pair.first;
    to = pair.second;
  }
  Socket socket = start_connect(to, from);
  const int code = socket ? 0 : errno;
  const int fd = socket.fd();
  outgoing_.push_back(std::make_unique<Outgoing>(*this, link, std::move(socket), to.text(), striped, tries));
  if (code != 0) return on_unreachable(outgoing_.back().get(), error_text(code));
  poller_.add(fd, EPOLLOUT, outgoing_.back().get());
  events_at_ns_ = 0;
}

std::string TcpTransport::ticket_for(const TcpLink& link) {
  // Its control connection exists: outgoing connections end with it.
  return make_ticket(peer_of(link.peer()).side->session(), opening_of(world_, kDataMagic, link.channel().key()));
}

void TcpTransport::on_established(Outgoing* connection) {
  poller_.remove(connection->socket_.fd());
  attach(connection->link_, std::move(connection->socket_));
  end(connection);
}

void TcpTransport::on_refused(Outgoing* connection, const std::string& why) {
  if (connection->tries_ >= kMaxTries) return on_unreachable(connection, why);
  TcpLink& link = connection->link_;
  const bool striped = connection->striped_;
  const int tries = connection->tries_ + 1;
  log_.debug("[tcp] " + connection->where_ + " closed a data connection before it was established, try " +
             std::to_string(tries));
  end(connection);
  connect(link, striped, tries);
}

void TcpTransport::on_unreachable(Outgoing* connection, const std::string& why) {
  TcpLink& link = connection->link_;
  const bool again = connection->striped_ && peer_of(link.peer()).gone.empty();
  if (again)
    log_.warning("[tcp] stream " + std::to_string(link.channel().stream) + " to rank " + std::to_string(link.peer()) +
                 " cannot use " + connection->where_ + " (" + why + ") and shares another interface");
  else link.break_off("cannot connect to " + connection->where_ + ": " + why);
  end(connection);
  if (again) connect(link, false);
}

void TcpTransport::end(Outgoing* connection) {
  poller_.remove(connection->socket_.fd());
  connection->socket_.reset();
  const auto found =
      std::find_if(outgoing_.begin(), outgoing_.end(), [&](const auto& entry) { return entry.get() == connection; });
  std::unique_ptr<Outgoing> gone = std::move(*found);
  outgoing_.erase(found);
  poller_.retire(std::move(gone));
}

void TcpTransport::attach(TcpLink& link, Socket socket) {
  const int fd = socket.fd();
  // A job that is suspended as a whole may do so with buffers that are full: no limit for what its receivers leave
  // unread. If the host is gone, its control connection tells, and so do the engine's clocks.
  if (keep_alive_s_ > 0) keep_alive(fd, keep_alive_s_);
  link.attach(std::move(socket));
  waker_.watch(fd);
  --unattached_;
}

// ---- members ----

std::string TcpTransport::may_join(int rank) {
  const auto found = peers_.find(rank);
  if (found == peers_.end() || rank <= world_.rank)
    return "it says that it is rank " + std::to_string(rank) + ", which this rank does not expect";
  if (found->second.side || !found->second.gone.empty())
    return "it says that it is rank " + std::to_string(rank) + ", which has connected already";
  return "";
}

const std::string* TcpTransport::session_with(int rank) {
  const auto found = peers_.find(rank);
  // The higher rank connects.
  if (found == peers_.end() || rank <= world_.rank || !found->second.side) return nullptr;
  return &found->second.side->session();
}

void TcpTransport::on_side(int rank, Socket socket, std::string session) {
  Peer& peer = peer_of(rank);
  peer.address = peer_address(socket.fd());
  if (keep_alive_s_ > 0) {
    keep_alive(socket.fd(), keep_alive_s_);
    limit_unacknowledged(socket.fd(), keep_alive_s_);  // heartbeats fill no buffer
  }
  peer.side = std::make_unique<TcpControlConnection>(poller_, traffic_, *this, peer.alive_ns, world_.rank, rank,
                                                     std::move(socket), std::move(session));
}

std::string TcpTransport::on_data(int rank, Channel channel, Socket socket) {
  if (peer_of(rank).forgotten.count(channel.group) != 0) return "";
  TcpLink& link = link_of(peer_of(rank), rank, channel);
  if (link.attached()) return "a second data connection for one channel of rank " + std::to_string(rank);
  traffic_.received += kOpeningSize;
  // A fresh connection always has room for a byte.
  if (send_some(socket.fd(), &kWelcome, 1) != 1) return "it closed the connection";
  ++traffic_.sent;
  attach(link, std::move(socket));
  return "";
}

void TcpTransport::on_control_message(int rank, std::string text) {
  peer_events_.push_back(PeerEvent{rank, PeerEvent::Kind::kControlMessage, std::move(text)});
}

void TcpTransport::on_gone(int rank, const std::string& why) {
  Peer& peer = peer_of(rank);
  peer.gone = why;
  peer_events_.push_back(PeerEvent{rank, PeerEvent::Kind::kGone, why});
  for (size_t i = outgoing_.size(); i-- > 0;)
    if (outgoing_[i]->link_.peer() == rank) end(outgoing_[i].get());
  // Established links may still hold data that it sent before it left; they notice its end themselves.
  for (const auto& [key, link] : peer.links)
    if (!link->attached()) link->break_off(why);
  poller_.retire(std::move(peer.side));
}

// ---- the progress pass ----

void TcpTransport::poll(bool woken) {
  const int64_t now = now_ns();
  traffic_.now_ns = now;
  if (!woken && now < retry_at_ns_) return;
  ++traffic_.round;
  retry_at_ns_ = now + kRetryPause * std::max<int64_t>(1, traffic_.fruitless);
  traffic_.fruitless = 0;
  if (woken || now >= events_at_ns_) look_at_events();
}

void TcpTransport::look_at_events() {
  poller_.run(0);
  const int64_t now = traffic_.now_ns;
  events_at_ns_ = now + (unattached_ != 0 ? kBusyEventsPause : kEventsPause);
  if (now < time_check_at_ns_) return;
  time_check_at_ns_ = now + kTimeCheckPause;
  acceptor_->check_time();
  for (size_t i = outgoing_.size(); i-- > 0;)
    if (i < outgoing_.size() && !outgoing_[i]->connected_ && now - outgoing_[i]->since_ns_ > kConnectLimit)
      on_unreachable(outgoing_[i].get(), "no answer");
}

void TcpTransport::send_control_message(int rank, const std::string& message) {
  const auto found = peers_.find(rank);
  if (found != peers_.end() && found->second.side) found->second.side->send_control_message(message);
}

bool TcpTransport::next_event(PeerEvent* event) {
  if (peer_events_.empty()) return false;
  *event = std::move(peer_events_.front());
  peer_events_.pop_front();
  return true;
}

// While the world starts, one thread has the connections, without the lock.
void TcpTransport::send_all_heartbeats() PERSEUS_NO_THREAD_ANALYSIS {
  for (auto& [rank, peer] : peers_)
    if (peer.side) peer.side->send_heartbeat();
}

}  // namespace perseus

// The connector's side of the handshake of a control connection.
#include "transport/tcp_connector.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/descriptors.h"
#include "transport/tcp_protocol.h"

namespace perseus {

using namespace tcp_protocol;

namespace {

constexpr int64_t kStagger = 250 * kMillisecond;
constexpr int64_t kRoundPause = 200 * kMillisecond;
// The peer may still be waiting for lower ranks' addresses; a wrong address must not hold us for long either.
constexpr int64_t kAttemptLimit = 5 * kSecond;
// Once the peer has answered, it may find us proven at any moment, and would take our giving up for our end. It may be
// slow: hundreds of ranks can start on a few cores.
constexpr int64_t kProofLimit = 30 * kSecond;

}  // namespace

class TcpConnector::Attempt : public PollHandler {
 public:
  Attempt(TcpConnector& owner, Socket socket, const SocketAddress& address, int64_t now)
      : owner_(owner),
        socket_(std::move(socket)),
        where_(address.text()),
        since_ns_(now),
        handshake_(Handshake::Side::kConnector, owner.world_.secret, owner.world_.job, opening_of(owner.world_, kMagic),
                   Versions::kSame, [this](const Opening& theirs) { return admit(theirs); }) {}

  int fd() const { return socket_.fd(); }
  int64_t since_ns() const { return since_ns_; }
  const std::string& where() const { return where_; }

  void on_event(uint32_t events) override {
    if (!connected_) {
      if (const int code = connect_result(socket_.fd()); code != 0) return owner_.end(this, std::strerror(code));
      if ((events & EPOLLOUT) == 0) return;
      connected_ = true;
      owner_.poller_.change(socket_.fd(), EPOLLIN, this);
      return say(handshake_.open());
    }
    char buffer[kOpeningSize];
    const ssize_t n = recv_some(socket_.fd(), buffer, handshake_.wanted());
    if (n < 0) return owner_.end(this, kClosed);
    const std::string reply = handshake_.feed(buffer, static_cast<size_t>(n));
    if (handshake_.refusal().kind == Refusal::Kind::kSecret) return owner_.end(this, kClosed);
    if (handshake_.refusal()) return owner_.end(this, handshake_.refusal().why);
    if (handshake_.proven()) return owner_.succeed(this);
    if (!reply.empty()) say(reply);
  }

 private:
  friend class TcpConnector;
  static constexpr const char* kClosed =
      "closed during the handshake: is that the right host, and do all ranks have the same secret?";

  std::string admit(const Opening& theirs) {
    if (theirs.rank != owner_.peer_) return "rank " + std::to_string(theirs.rank) + " answers there";
    return owner_.choose(this) ? "" : "answered later than another address";
  }

  // A fresh connection always has room for a hundred bytes.
  void say(const std::string& bytes) {
    if (send_some(socket_.fd(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
      owner_.end(this, "closed during the handshake");
  }

  TcpConnector& owner_;
  Socket socket_;
  const std::string where_;
  const int64_t since_ns_;
  bool connected_ = false;
  Handshake handshake_;
};

TcpConnector::TcpConnector(Poller& poller, const World& world, int peer, std::vector<SocketAddress> candidates,
                           Done done)
    : poller_(poller), world_(world), peer_(peer), candidates_(std::move(candidates)), on_done_(std::move(done)) {}

TcpConnector::~TcpConnector() {
  for (const auto& attempt : attempts_) poller_.remove(attempt->fd());
}

std::string TcpConnector::trouble() const {
  return !trouble_.empty() || attempts_.empty() ? trouble_ : attempts_.front()->where() + ": not connected yet";
}

void TcpConnector::check_time() {
  if (done_) return;
  const int64_t now = now_ns();
  while (!attempts_.empty() &&
         now - attempts_.front()->since_ns() > (attempts_.front().get() == chosen_ ? kProofLimit : kAttemptLimit))
    end(attempts_.front().get(), "no answer");
  if (chosen_ != nullptr || now < next_start_ns_) return;
  if (next_ == candidates_.size()) {
    if (!attempts_.empty()) return;
    next_ = 0;
  }
  const SocketAddress& address = candidates_[next_++];
  next_start_ns_ = now + (next_ == candidates_.size() ? kRoundPause : kStagger);
  start(address, now);
}

void TcpConnector::start(const SocketAddress& address, int64_t now) {
  Socket socket = start_connect(address);
  if (!socket) {
    trouble_ = address.text() + ": " + error_text(errno);
    return;
  }
  attempts_.push_back(std::make_unique<Attempt>(*this, std::move(socket), address, now));
  poller_.add(attempts_.back()->fd(), EPOLLOUT, attempts_.back().get());
}

void TcpConnector::end(Attempt* attempt, const std::string& why) {
  trouble_ = attempt->where() + ": " + why;
  if (chosen_ == attempt) chosen_ = nullptr;
  // The next address need not wait for its turn.
  if (next_ < candidates_.size()) next_start_ns_ = 0;
  poller_.remove(attempt->fd());
  attempt->socket_.reset();
  const auto same = [&](const auto& entry) { return entry.get() == attempt; };
  const auto found = std::find_if(attempts_.begin(), attempts_.end(), same);
  std::unique_ptr<Attempt> gone = std::move(*found);
  attempts_.erase(found);
  poller_.retire(std::move(gone));
}

bool TcpConnector::choose(Attempt* attempt) {
  if (chosen_ != nullptr) return false;
  while (attempts_.size() > 1)
    end(attempts_.front().get() == attempt ? attempts_.back().get() : attempts_.front().get(), "slower than another");
  chosen_ = attempt;
  return true;
}

void TcpConnector::succeed(Attempt* attempt) {
  done_ = true;
  poller_.remove(attempt->fd());
  on_done_(std::move(attempt->socket_), attempt->handshake_.session());
  end(attempt, "done");
}

}  // namespace perseus

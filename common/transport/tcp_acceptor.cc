// The acceptor's side of the handshakes in tcp_protocol.h.
#include "transport/tcp_acceptor.h"

#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/descriptors.h"

namespace perseus {

using namespace tcp_protocol;

namespace {

constexpr PendingLimits kLimits{256, 5 * kSecond, 1 * kSecond};
// A port scan must not fill the log.
constexpr int kMaxWarnings = 8;

}  // namespace

class TcpAcceptor::Listener : public PollHandler {
 public:
  Listener(TcpAcceptor& owner, Socket socket) : owner_(owner), socket_(std::move(socket)) {}
  int fd() const { return socket_.fd(); }
  void on_event(uint32_t) override { owner_.accept_from(socket_.fd()); }

 private:
  TcpAcceptor& owner_;
  Socket socket_;
};

// A connection that has not yet proved anything.
class TcpAcceptor::Pending : public PollHandler {
 public:
  Pending(TcpAcceptor& owner, Socket socket)
      : owner_(owner), socket_(std::move(socket)), from_(peer_address(socket_.fd()).text()) {}

  int fd() const { return socket_.fd(); }
  const std::string& from() const { return from_; }

  void on_event(uint32_t) override {
    const size_t wanted = challenged_ ? kProofSize : kHelloSize;
    char buffer[kHelloSize];
    const ssize_t n = recv_some(socket_.fd(), buffer, wanted - in_.size());
    // Most likely one of several tries by a rank that got through by another.
    if (n < 0) return owner_.drop(this);
    in_.append(buffer, static_cast<size_t>(n));
    if (in_.size() < wanted) return;
    const std::string refusal = challenged_ ? check_answer() : check_hello();
    in_.clear();
    if (!refusal.empty()) owner_.refuse(this, refusal);
    else if (proven_) owner_.welcome(this);
  }

 private:
  friend class TcpAcceptor;

  std::string check_hello() {
    const std::string wrong = hello_.decode(in_, owner_.world_.version);
    if (!wrong.empty()) return wrong;
    const World& world = owner_.world_;
    if (hello_.epoch != world.epoch)
      return "it belongs to epoch " + std::to_string(hello_.epoch) + " of the job, expected " +
             std::to_string(world.epoch);
    if (hello_.purpose == Purpose::kData) {
      const SideKeys* keys = owner_.members_.keys_of(hello_.rank);
      proven_ = keys != nullptr && keys->connector == hello_.rank &&
                proof_is_good(hello_.tail, Claim::kData, world, *keys, hello_.channel);
      return proven_ ? "" : "it could not prove that it is rank " + std::to_string(hello_.rank);
    }
    const std::string refusal = owner_.members_.may_join(hello_.rank);
    if (!refusal.empty()) return refusal;
    keys_ = SideKeys{hello_.rank, world.rank, hello_.tail, random_bytes(kNonceSize)};
    challenged_ = true;
    return say(keys_.acceptor_nonce);
  }

  std::string check_answer() {
    const World& world = owner_.world_;
    if (!proof_is_good(in_, Claim::kConnector, world, keys_))
      return "it does not know this job's secret: start every rank with the same one (PERSEUS_SECRET_FILE), or is it "
             "another job's rank?";
    const std::string refusal = owner_.members_.may_join(hello_.rank);
    proven_ = refusal.empty();
    return proven_ ? say(proof_of(Claim::kAcceptor, world, keys_)) : refusal;
  }

  // A fresh connection always has room for 32 bytes.
  std::string say(const std::string& bytes) {
    if (send_some(socket_.fd(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size())) return "";
    proven_ = false;
    return "it closed the connection";
  }

  TcpAcceptor& owner_;
  Socket socket_;
  const std::string from_;
  std::string in_;
  Hello hello_;
  SideKeys keys_;
  bool challenged_ = false;
  bool proven_ = false;
};

TcpAcceptor::TcpAcceptor(Poller& poller, const World& world, Members& members, const Log& log)
    : poller_(poller), world_(world), members_(members), log_(log), pending_(kLimits) {}

TcpAcceptor::~TcpAcceptor() {
  for (const auto& listener : listeners_) poller_.remove(listener->fd());
  pending_.keep_if([this](const auto& connection) { return poller_.remove(connection->fd()), true; });
}

void TcpAcceptor::listen(Socket socket) {
  listeners_.push_back(std::make_unique<Listener>(*this, std::move(socket)));
  poller_.add(listeners_.back()->fd(), EPOLLIN, listeners_.back().get());
}

void TcpAcceptor::accept_from(int listener) {
  for (;;) {
    const auto room = pending_.room(now_ns());
    if (room == decltype(pending_)::Room::kNone) return pause();
    if (room == decltype(pending_)::Room::kOldestMakesWay)
      refuse(pending_.oldest().get(), "it said nothing while others were waiting");
    Socket socket = accept_one(listener);
    if (!socket) {
      const int why = errno;
      if (why == EAGAIN) return;
      if (!said_shortage_) log_.warning("[tcp] ranks that connect have to wait: " + error_text(why));
      said_shortage_ = true;
      return pause();
    }
    auto connection = std::make_unique<Pending>(*this, std::move(socket));
    Pending* added = connection.get();
    pending_.add(std::move(connection), now_ns());
    poller_.add(added->fd(), EPOLLIN, added);
    added->on_event(EPOLLIN);  // its hello is usually here already
  }
}

void TcpAcceptor::pause() {
  for (const auto& listener : listeners_) poller_.change(listener->fd(), 0, listener.get());
  pending_.pause(now_ns());
}

void TcpAcceptor::check_time() {
  const int64_t now = now_ns();
  while (pending_.oldest_is_late(now)) refuse(pending_.oldest().get(), "it did not say in time who it is");
  if (!pending_.may_resume(now)) return;
  for (const auto& listener : listeners_) poller_.change(listener->fd(), EPOLLIN, listener.get());
}

void TcpAcceptor::drop(Pending* connection) {
  poller_.remove(connection->fd());
  connection->socket_.reset();
  poller_.retire(*pending_.take([=](const auto& entry) { return entry.get() == connection; }));
}

void TcpAcceptor::refuse(Pending* connection, const std::string& why) {
  const LogLevel level = ++warnings_ <= kMaxWarnings ? LogLevel::kWarning : LogLevel::kDebug;
  log_.write(level, "[tcp] closed a connection from " + connection->from() + ": " + why);
  drop(connection);
}

void TcpAcceptor::welcome(Pending* connection) {
  poller_.remove(connection->fd());
  Socket socket = std::move(connection->socket_);
  const Hello& hello = connection->hello_;
  if (hello.purpose == Purpose::kSide) {
    members_.on_side(hello.rank, std::move(socket), connection->keys_);
  } else if (const std::string refusal = members_.on_data(hello.rank, hello.channel, std::move(socket));
             !refusal.empty()) {
    return refuse(connection, refusal);
  }
  drop(connection);
}

}  // namespace perseus

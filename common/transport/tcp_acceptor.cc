// The listener's side of tcp_protocol.h.
#include "transport/tcp_acceptor.h"

#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/descriptors.h"
#include "base/little_endian.h"
#include "transport/tcp_protocol.h"

namespace perseus {

using namespace tcp_protocol;

namespace {

constexpr PendingLimits kLimits{256, 5 * kSecond, 1 * kSecond};
constexpr size_t kPendingShare = 8, kLeastPending = 16;
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
      : owner_(owner),
        socket_(std::move(socket)),
        from_(peer_address(socket_.fd()).text()),
        handshake_(Handshake::Side::kListener, owner.world_.secret, owner.world_.job, opening_of(owner.world_, kMagic),
                   Versions::kSame, [&owner](const Opening& theirs) { return owner.members_.may_join(theirs.rank); }) {}

  int fd() const { return socket_.fd(); }
  const std::string& from() const { return from_; }

  void on_event(uint32_t) override {
    const size_t wanted = greeted_ ? handshake_.wanted() : kOpeningSize - in_.size();
    char buffer[kOpeningSize];
    const ssize_t n = recv_some(socket_.fd(), buffer, wanted);
    // Most likely one of several tries by a rank that got through by another.
    if (n < 0) return owner_.drop(this);
    in_.append(buffer, static_cast<size_t>(n));
    if (!greeted_ && in_.size() < kOpeningSize) return;
    const bool ticket = !greeted_ && get_u32(in_.data()) == kDataMagic;
    greeted_ = true;
    const std::string refusal = ticket ? check_ticket() : shake_hands();
    in_.clear();
    if (!refusal.empty()) owner_.refuse(this, refusal);
    else if (proven_) owner_.welcome(this);
  }

 private:
  friend class TcpAcceptor;

  std::string check_ticket() {
    const Refusal refusal = read_opening(in_, opening_of(owner_.world_, kDataMagic), Versions::kSame, &data_);
    if (refusal) return refusal.why;
    const std::string* session = owner_.members_.session_with(data_.rank);
    proven_ = session != nullptr && ticket_holds(*session, in_);
    return proven_ ? "" : "it could not prove that it is rank " + std::to_string(data_.rank);
  }

  std::string shake_hands() {
    const std::string reply = handshake_.feed(in_.data(), in_.size());
    // A fresh connection always has room for a hundred bytes.
    const bool said =
        reply.empty() || send_some(socket_.fd(), reply.data(), reply.size()) == static_cast<ssize_t>(reply.size());
    if (handshake_.refusal()) return handshake_.refusal().why;
    if (!said) return "it closed the connection";
    proven_ = handshake_.proven();
    return "";
  }

  TcpAcceptor& owner_;
  Socket socket_;
  const std::string from_;
  std::string in_;
  Handshake handshake_;
  Opening data_;          // of a data connection
  bool greeted_ = false;  // its opening has come
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
  pending_.set_most(descriptors_for_pending(kPendingShare, kLeastPending, kLimits.most));
  for (;;) {
    const auto room = pending_.room(now_ns());
    if (room == decltype(pending_)::Room::kNone) return pause();
    if (room == decltype(pending_)::Room::kOldestMakesWay)
      refuse(pending_.oldest().get(), "it said nothing while others were waiting");
    Socket socket = accept_one(listener);
    if (!socket) {
      const int why = errno;
      shortage_ = why == EAGAIN ? 0 : why;
      if (why == EAGAIN) return;
      if (!warned_of_shortage_) log_.warning("[tcp] ranks that connect have to wait: " + error_text(why));
      warned_of_shortage_ = true;
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
  const Handshake& handshake = connection->handshake_;
  const Opening& data = connection->data_;
  std::string refusal;
  if (handshake.proven()) members_.on_side(handshake.theirs().rank, std::move(socket), handshake.session());
  else refusal = members_.on_data(data.rank, Channel::of_key(data.channel), std::move(socket));
  if (!refusal.empty()) return refuse(connection, refusal);
  drop(connection);
}

}  // namespace perseus

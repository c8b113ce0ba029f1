// The store's client: a call takes an idle connection or makes one, so that a waiting get() holds up nobody; one that
// gave up waiting closes its connection, which is how the server learns of it. Thread-safe.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/mutex.h"
#include "bootstrap/numbered_keys.h"
#include "bootstrap/store.h"
#include "bootstrap/store_protocol.h"
#include "net/handshake.h"
#include "net/poller.h"
#include "net/socket.h"

namespace perseus {
namespace {

using namespace store_protocol;

constexpr int64_t kSlice = 100 * kMillisecond;
constexpr int64_t kRetryPause = 50 * kMillisecond;
// An address that does not even refuse (a firewall, a host that is down) must not use up the others' time.
constexpr int64_t kConnectLimit = 3 * kSecond;
// What is received at once.
constexpr size_t kPiece = 64 * 1024;

using Interrupted = Store::Interrupted;

// What a call waits for, and for how long.
struct Call {
  std::function<std::string()> key;  // of several, one that is missing
  bool awaits_key;                   // else only the server's answer
  int64_t deadline_ns;
  const Interrupted& interrupted;
  int64_t ask_at_ns = now_ns() + kSlice;  // where parts of an answer come so often that no wait takes a slice
};

// To the server, which has proved itself.
struct Connection {
  Socket socket;
  AuthenticationCode of_requests, of_replies;
};

// One connection attempt's failure. `final`: trying again would not help.
struct Failure {
  bool final = false;
  std::string why;
};

class TcpStore : public Store {
 public:
  TcpStore(const std::string& host, int port, const std::string& secret)
      : host_(host), port_(port), secret_(secret), where_(host + ":" + std::to_string(port)) {}

  // Retries what may still come right.
  void connect(int64_t deadline_ns, const Interrupted& interrupted) {
    for (;;) {
      Failure failure;
      std::optional<Connection> connection = try_connect(deadline_ns, interrupted, &failure);
      if (connection) return give_back(std::move(*connection));
      if (failure.final) fail(ErrorKind::kIo, "[rendezvous] " + failure.why);
      if (now_ns() + kRetryPause >= deadline_ns)
        fail(ErrorKind::kIo, "[rendezvous] no store server at " + where_ + " in time (" + failure.why +
                                 "): is rank 0 running, and is that its address?");
      std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryPause));
      ask(interrupted);
    }
  }

  void set(const std::string& key, const std::string& value, int64_t deadline_ns,
           const Interrupted& interrupted) override {
    if (value.size() > kMaxValue)
      fail(ErrorKind::kInvalidArgument, "[rendezvous] value of key '" + key + "' has " + std::to_string(value.size()) +
                                            " bytes: expected at most " + std::to_string(kMaxValue));
    request(kSet, key, value, deadline_ns, interrupted);
  }

  std::string get(const std::string& key, int64_t deadline_ns, const Interrupted& interrupted) override {
    return request(kGet, key, "", deadline_ns, interrupted);
  }

  std::vector<int> get_all(const std::string& prefix, const std::vector<int>& numbers, int64_t deadline_ns,
                           const OnValue& on_value, const Interrupted& interrupted) override {
    return request_numbered(kGetAll, prefix, numbers, deadline_ns, on_value, interrupted);
  }

  std::vector<int> get_present(const std::string& prefix, const std::vector<int>& numbers, int64_t deadline_ns,
                               const OnValue& on_value, const Interrupted& interrupted) override {
    return request_numbered(kGetPresent, prefix, numbers, deadline_ns, on_value, interrupted);
  }

 private:
  std::string request(uint32_t op, const std::string& key, const std::string& value, int64_t deadline_ns,
                      const Interrupted& interrupted) {
    Call call{[&key] { return key; }, op == kGet, deadline_ns, interrupted};
    Connection connection = take(deadline_ns, interrupted);
    if (!send_request(&connection, op, key, value, call)) late(call);
    std::string head, result;
    while (head.size() < 4)
      if (!receive(connection.socket, 4 - head.size(), &head, call)) late(call);
    const size_t size = checked_size(head.data());
    result.reserve(size + kCode);
    while (result.size() < size + kCode)
      if (!receive(connection.socket, size + kCode - result.size(), &result, call)) late(call);
    const std::string code = result.substr(size);
    result.resize(size);
    if (connection.of_replies.behind(head, result) != code) nonsense(AuthenticationCode::refusal(head.size() + size));
    give_back(std::move(connection));
    return result;
  }

  // Returns the numbers of keys that did not exist.
  std::vector<int> request_numbered(uint32_t op, const std::string& prefix, const std::vector<int>& numbers,
                                    int64_t deadline_ns, const OnValue& on_value, const Interrupted& interrupted) {
    if (numbers.size() > kMaxNumbers)
      fail(ErrorKind::kInvalidArgument, "[rendezvous] " + std::to_string(numbers.size()) + " keys '" + prefix +
                                            "…' at once: expected at most " + std::to_string(kMaxNumbers));
    NumberedKeys unanswered(prefix, numbers);
    std::vector<int> absent;
    if (unanswered.all_came()) return absent;
    std::string body, in;
    for (const int number : numbers) put_u32(&body, static_cast<uint32_t>(number));
    Call call{[&unanswered] { return unanswered.first_missing(); }, op == kGetAll, deadline_ns, interrupted};
    Connection connection = take(deadline_ns, interrupted);
    bool in_time = send_request(&connection, op, prefix, body, call);
    while (in_time && !unanswered.all_came()) {
      in_time = receive(connection.socket, kPiece, &in, call);
      std::vector<int>* const may_lack = op == kGetPresent ? &absent : nullptr;
      in.erase(0, take_entries(in, &connection.of_replies, may_lack, &unanswered, on_value));
    }
    if (!in_time && op == kGetAll) return unanswered.missing();
    if (!in_time) late(call);
    if (!in.empty()) nonsense(std::to_string(in.size()) + " bytes after the last value");
    give_back(std::move(connection));
    return absent;
  }

  // Those that are complete; returns how many bytes they have. Where `absent` is null, no key may be.
  size_t take_entries(const std::string& in, AuthenticationCode* of_replies, std::vector<int>* absent,
                      NumberedKeys* unanswered, const OnValue& on_value) {
    size_t at = 0;
    while (!unanswered->all_came() && in.size() - at >= kEntryHeader + kCode) {
      const int number = static_cast<int>(get_u32(&in[at]));
      if (!unanswered->is_missing(number)) nonsense("number " + std::to_string(number) + " was not asked for");
      const bool has_value = absent == nullptr || get_u32(&in[at + 4]) != kAbsent;
      const size_t size = has_value ? checked_size(&in[at + 4]) : 0;
      const std::string_view rest = std::string_view(in).substr(at);
      if (rest.size() < kEntryHeader + size + kCode) break;
      if (of_replies->behind(rest.substr(0, kEntryHeader + size)) != rest.substr(kEntryHeader + size, kCode))
        nonsense(AuthenticationCode::refusal(kEntryHeader + size));
      unanswered->mark(number);
      if (has_value) on_value(number, in.substr(at + kEntryHeader, size));
      else absent->push_back(number);
      at += kEntryHeader + size + kCode;
    }
    return at;
  }

  // False when it has not left by the deadline.
  bool send_request(Connection* connection, uint32_t op, const std::string& key, const std::string& body, Call& call) {
    if (key.empty() || key.size() > kMaxKey)
      fail(ErrorKind::kInvalidArgument,
           "[rendezvous] a key of " + std::to_string(key.size()) + " bytes: expected 1 to " + std::to_string(kMaxKey));
    std::string message;
    put_u32(&message, static_cast<uint32_t>(kRequestHeader + key.size() + body.size()));
    put_u32(&message, op);
    put_u32(&message, static_cast<uint32_t>(key.size()));
    message += key + body;
    message += connection->of_requests.behind(message);
    const Socket& socket = connection->socket;
    for (size_t sent = 0; sent < message.size();) {
      const ssize_t n = send_some(socket.fd(), message.data() + sent, message.size() - sent);
      if (n < 0) gone(call.key(), std::strerror(errno));
      if (n == 0 && !wait(socket, POLLOUT, call)) return false;
      sent += static_cast<size_t>(n);
    }
    return true;
  }

  // Appends 1 to `most` bytes; false at the deadline.
  bool receive(const Socket& socket, size_t most, std::string* bytes, Call& call) {
    char buffer[kPiece];
    for (;;) {
      const ssize_t n = recv_some(socket.fd(), buffer, std::min(most, sizeof buffer));
      if (n < 0) gone(call.key(), n == kEndOfStream ? "connection closed" : std::strerror(errno));
      bytes->append(buffer, static_cast<size_t>(n));
      if (n > 0) return true;
      if (!wait(socket, POLLIN, call)) return false;
    }
  }

  size_t checked_size(const char* bytes) {
    const uint32_t size = get_u32(bytes);
    if (size > kMaxValue)
      nonsense("expected at most " + std::to_string(kMaxValue) + " bytes, got " + std::to_string(size));
    return size;
  }

  [[noreturn]] void nonsense(const std::string& what) {
    fail(ErrorKind::kIo, "[rendezvous] the store server at " + where_ + " sent nonsense: " + what);
  }

  // False at the deadline.
  bool wait(const Socket& socket, short events, Call& call) {
    Wait outcome = wait_for(socket.fd(), events, call.deadline_ns, call.interrupted);
    if (outcome == Wait::kReady && call.interrupted && now_ns() >= call.ask_at_ns) {
      if (call.interrupted()) outcome = Wait::kInterrupted;
      call.ask_at_ns = now_ns() + kSlice;
    }
    if (outcome == Wait::kInterrupted)
      fail(ErrorKind::kAborted, "[rendezvous] interrupted while waiting for key '" + call.key() + "'");
    return outcome == Wait::kReady;
  }

  [[noreturn]] void late(const Call& call) {
    if (call.awaits_key) fail(ErrorKind::kTimeout, "[rendezvous] key '" + call.key() + "' was not set in time");
    fail(ErrorKind::kTimeout, "[rendezvous] the store server at " + where_ + " did not answer in time, key '" +
                                  call.key() + "': was its process, rank 0's or the launcher's, or this rank paused?");
  }

  [[noreturn]] void gone(const std::string& key, const std::string& why) {
    fail(ErrorKind::kIo, "[rendezvous] the store server at " + where_ + " is gone (" + why + "), key '" + key +
                             "': look at what rank 0 or the launcher printed");
  }

  static void ask(const Interrupted& interrupted) {
    if (interrupted && interrupted()) fail(ErrorKind::kAborted, "[rendezvous] interrupted while connecting");
  }

  Connection take(int64_t deadline_ns, const Interrupted& interrupted) {
    {
      const MutexLock lock(mutex_);
      if (!idle_.empty()) {
        Connection connection = std::move(idle_.back());
        idle_.pop_back();
        return connection;
      }
    }
    Failure failure;
    // Whoever set up the first connection found a server: give a busy one time even if the caller has none.
    std::optional<Connection> connection =
        try_connect(std::max(deadline_ns, now_ns() + kSecond), interrupted, &failure);
    if (!connection) fail(ErrorKind::kIo, "[rendezvous] " + failure.why + ": the store server is gone");
    return std::move(*connection);
  }

  void give_back(Connection connection) {
    const MutexLock lock(mutex_);
    idle_.push_back(std::move(connection));
  }

  std::optional<Connection> try_connect(int64_t deadline_ns, const Interrupted& interrupted, Failure* failure) {
    std::string why;
    const std::vector<SocketAddress> addresses = resolve(host_, port_, &why);
    if (addresses.empty()) failure->why = "cannot resolve '" + host_ + "': " + why;
    for (const SocketAddress& address : addresses) {
      const int64_t limit = std::min(deadline_ns, now_ns() + kConnectLimit);
      Socket socket = start_connect(address);
      int code = socket ? 0 : errno;
      if (socket) {
        keep_alive(socket.fd());
        limit_unacknowledged(socket.fd());
        const Wait outcome = wait_for(socket.fd(), POLLOUT, limit, interrupted);
        if (outcome == Wait::kInterrupted) fail(ErrorKind::kAborted, "[rendezvous] interrupted while connecting");
        code = outcome == Wait::kTimeout ? ETIMEDOUT : connect_result(socket.fd());
      }
      if (code != 0) {
        failure->why = address.text() + ": " + error_text(code);
        continue;
      }
      const int64_t handshake_limit = std::min(deadline_ns, now_ns() + kHandshakeLimit);
      const std::string session = shake_hands(socket, address.text(), handshake_limit, interrupted, failure);
      if (!session.empty()) return Connection{std::move(socket), code_of_requests(session), code_of_replies(session)};
      if (failure->final) break;
    }
    return std::nullopt;
  }

  // Returns the session; "" where it failed.
  std::string shake_hands(const Socket& socket, const std::string& where, int64_t deadline_ns,
                          const Interrupted& interrupted, Failure* failure) {
    Handshake handshake(Handshake::Side::kConnector, secret_, "", opening(), Versions::kAny);
    bool greeted = false;
    char buffer[kOpeningSize];
    while (!handshake.proven() && !handshake.refusal()) {
      const ssize_t n = recv_some(socket.fd(), buffer, handshake.wanted());
      if (n < 0) break;
      if (n == 0) {
        const Wait outcome = wait_for(socket.fd(), POLLIN, deadline_ns, interrupted);
        if (outcome == Wait::kInterrupted) fail(ErrorKind::kAborted, "[rendezvous] interrupted while connecting");
        if (outcome == Wait::kTimeout) break;
        continue;
      }
      const std::string reply = handshake.feed(buffer, static_cast<size_t>(n));
      if (reply.empty()) continue;
      greeted = true;
      if (send_some(socket.fd(), reply.data(), reply.size()) != static_cast<ssize_t>(reply.size())) break;
    }
    if (handshake.proven()) return handshake.session();
    // A server may have been too busy for us; one that has answered will not answer otherwise.
    failure->final = static_cast<bool>(handshake.refusal());
    failure->why = handshake.refusal() ? refusal_text(handshake, where)
                   : greeted           ? where + ": closed or silent during the handshake"
                                       : where + ": no greeting from a store server";
    return "";
  }

  static std::string refusal_text(const Handshake& handshake, const std::string& where) {
    switch (handshake.refusal().kind) {
      case Refusal::Kind::kFormat:
        return "the store server at " + where + " runs Perseus " + handshake.theirs().version + ", this rank Perseus " +
               this_version() + ": they do not understand each other (format " +
               std::to_string(handshake.theirs().format) + " of the store, not " + std::to_string(kFormat) +
               "); install the same Perseus on every host";
      case Refusal::Kind::kSecret:
        return "the store server at " + where + " has another secret than this rank: start every rank with the same " +
               "one (PERSEUS_SECRET_FILE), or is that another job's server?";
      case Refusal::Kind::kImpostor:
        return "the server at " + where + " could not prove that it knows the job's secret";
      default:
        return where + " answers, but is not a Perseus store server: is the port right?";
    }
  }

  const std::string host_;
  const int port_;
  const std::string secret_;
  const std::string where_;
  Mutex mutex_;
  std::vector<Connection> idle_ PERSEUS_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Store> connect_store(const std::string& host, int port, const std::string& secret, int64_t deadline_ns,
                                     const std::function<bool()>& interrupted) {
  if (secret.empty())
    fail(ErrorKind::kInvalidArgument, "[rendezvous] an empty secret proves nothing: give the store at " + host + ":" +
                                          std::to_string(port) + " the job's secret");
  auto store = std::make_shared<TcpStore>(host, port, secret);
  store->connect(deadline_ns, interrupted);
  return store;
}

}  // namespace perseus

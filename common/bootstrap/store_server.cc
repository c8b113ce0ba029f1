// The store's server: one thread and one poller. Nothing a client sends is looked at before it has proved the
// secret; a client that misbehaves is closed, without effect on others. Public calls are thread-safe.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/fork_guard.h"
#include "base/start_thread.h"
#include "bootstrap/numbered_keys.h"
#include "bootstrap/store.h"
#include "bootstrap/store_connection.h"
#include "bootstrap/store_protocol.h"
#include "net/pending_connections.h"
#include "net/poller.h"
#include "net/socket.h"

namespace perseus {
namespace {

using namespace store_protocol;

using Value = StoreConnection::Value;
using PendingIds = PendingConnections<uint64_t>;

// How many pending connections there may be: this part of the descriptors of the process, within two bounds.
constexpr size_t kPendingShare = 8, kLeastPending = 16, kMostPending = 1024;
constexpr int kPortsTried = 101;
constexpr uint64_t kNobody = 0;      // no client has this id
constexpr uint32_t kWorldsKept = 8;  // of a job

// Calls a function when its descriptor is ready.
class Watched : public PollHandler {
 public:
  using OnEvent = std::function<void(uint32_t events)>;
  explicit Watched(OnEvent on_event) : on_event_(std::move(on_event)) {}
  void on_event(uint32_t events) override { on_event_(events); }

 private:
  const OnEvent on_event_;
};

// The decimal number of which the text between two places consists.
std::optional<uint32_t> number_between(const std::string& text, size_t before, size_t behind) {
  if (behind == std::string::npos) return std::nullopt;
  uint32_t number = 0;
  const char* const end = text.data() + behind;
  const auto [rest, problem] = std::from_chars(text.data() + before + 1, end, number);
  if (problem != std::errc() || rest != end) return std::nullopt;
  return number;
}

class TcpStoreServer : public StoreServer {
 public:
  TcpStoreServer(std::vector<Socket> listeners, const std::string& secret)
      : listeners_(std::move(listeners)), secret_(secret), port_(local_address(listeners_[0].fd()).port()) {
    stop_ = Socket([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
    if (!stop_) fail(ErrorKind::kIo, "[rendezvous] eventfd: " + error_text(errno));
    poller_.add(stop_.fd(), EPOLLIN, &on_stop_);
    for (const Socket& listener : listeners_) {
      on_connection_.push_back(std::make_unique<Watched>(
          [this, fd = listener.fd()](uint32_t) { survive(kNobody, [&] { accept_from(fd); }); }));
      poller_.add(listener.fd(), EPOLLIN, on_connection_.back().get());
    }
    thread_ = start_thread("rendezvous", [this] { serve(); });
  }

  ~TcpStoreServer() override {
    if (fork_generation() != fork_generation_) {
      thread_.detach();  // it does not exist in this process
      return;
    }
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.fd(), &one, sizeof one);
    thread_.join();
  }

  int port() const override { return port_; }
  uint64_t requests() const override { return requests_.load(std::memory_order_relaxed); }

 private:
  void watch_listeners(uint32_t events) {
    for (size_t i = 0; i < listeners_.size(); ++i) poller_.change(listeners_[i].fd(), events, on_connection_[i].get());
  }

  void serve() {
    while (!stopping_) {
      poller_.run_once(next_timeout_ms());
      const int64_t now = now_ns();
      while (pending_.oldest_is_late(now)) close_oldest_pending();
      if (pending_.may_resume(now)) watch_listeners(EPOLLIN);
      send_due(now);
    }
  }

  int next_timeout_ms() const {
    int64_t next = pending_.next_event_ns();
    if (!due_.empty() && (next == 0 || due_.front().first < next)) next = due_.front().first;
    if (next == 0) return -1;
    return static_cast<int>(std::max<int64_t>(0, next - now_ns()) / kMillisecond + 1);
  }

  // Out of memory is one client's bad luck, not the end of the service.
  template <class Work>
  void survive(uint64_t id, const Work& work) {
    try {
      work();
    } catch (const std::exception&) {
      close_client(id);
    }
  }

  void accept_from(int listener) {
    pending_.set_most(descriptors_for_pending(kPendingShare, kLeastPending, kMostPending));
    // A bounded batch: those already here get their turn in between.
    for (int i = 0; i < 64; ++i) {
      Socket socket = accept_one(listener);
      if (!socket) {
        if (errno != EAGAIN) pause_accepting();
        return;
      }
      keep_alive(socket.fd());
      limit_unacknowledged(socket.fd());
      const uint64_t id = next_id_++;
      auto client = std::make_unique<StoreConnection>(
          id, std::move(socket), secret_, poller_,
          [this, id](uint32_t events) { survive(id, [&] { serve_client(id, events); }); });
      StoreConnection& added = *client;
      const int64_t now = now_ns();
      while (pending_.room(now) == PendingIds::Room::kOldestMakesWay) close_oldest_pending();
      // First: should memory end here, the entry without a client is forgotten at its deadline.
      pending_.add(id, now);
      clients_[id] = std::move(client);
      survive(id, [&] {
        if (!added.start()) close_client(id);
      });
    }
  }

  // Most likely this process has no descriptor left.
  void pause_accepting() {
    close_oldest_pending();
    pending_.pause(now_ns());
    watch_listeners(0);
  }

  void close_oldest_pending() {
    // Its client may be gone.
    if (const std::optional<uint64_t> id = pending_.take_oldest()) close_client(*id);
  }

  void forget_pending(uint64_t id) {
    pending_.take([id](uint64_t entry) { return entry == id; });
  }

  void close_client(uint64_t id) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    if (found->second->pending()) forget_pending(id);
    unpark(*found->second);
    found->second->stop();
    poller_.retire(std::move(found->second));  // it may be the one that is told of an event
    clients_.erase(found);
  }

  void serve_client(uint64_t id, uint32_t events) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    StoreConnection& client = *found->second;
    const bool was_pending = client.pending();
    const bool alive = client.serve(events, [&](StoreRequest request) {
      requests_.fetch_add(1, std::memory_order_relaxed);
      return handle_request(client, std::move(request));
    });
    if (was_pending && !client.pending()) forget_pending(id);
    if (!alive) close_client(id);
  }

  bool handle_request(StoreConnection& client, StoreRequest request) {
    switch (request.op) {
      case kSet:
        return handle_set(client, request.key, std::make_shared<const std::string>(std::move(request.body)));
      case kGet:
        return handle_get(client, request.key);
      case kGetAll:
      case kGetPresent:
        return handle_get_numbered(client, request.op == kGetAll, request.key, request.body);
      default:
        return false;
    }
  }

  bool handle_set(StoreConnection& client, const std::string& key, Value value) {
    if (value->size() > kMaxValue) return false;
    values_[key] = value;
    const auto waiting = parked_.find(key);
    if (waiting != parked_.end()) {
      const std::vector<uint64_t> ids = std::move(waiting->second);
      parked_.erase(waiting);
      for (const uint64_t id : ids)
        survive(id, [&] {
          if (!clients_.at(id)->reply(value)) close_client(id);
        });
    }
    tell_collecting(key, value);
    forget_worlds_before(key);
    return client.reply(std::make_shared<const std::string>());
  }

  // A rank sets <job>/<epoch>/left/<r> once all ranks of that world are connected. Nobody but ranks that come very late
  // asks for what is some worlds older: a job whose worlds follow each other needs no more and more memory here.
  void forget_worlds_before(const std::string& key) {
    const size_t word = key.rfind("/left/");
    const size_t before = word == std::string::npos || word == 0 ? std::string::npos : key.rfind('/', word - 1);
    if (before == std::string::npos) return;
    const std::string job = key.substr(0, before + 1);
    const std::optional<uint32_t> epoch = number_between(key, before, word);
    if (!epoch || *epoch < kWorldsKept || *epoch <= begun_[job]) return;
    begun_[job] = *epoch;
    for (auto next = values_.begin(); next != values_.end();) {
      const std::string& other = next->first;
      const bool same_job = other.compare(0, job.size(), job) == 0;
      const std::optional<uint32_t> of =
          same_job ? number_between(other, before, other.find('/', before + 1)) : std::nullopt;
      next = of && uint64_t{*of} + kWorldsKept <= *epoch ? values_.erase(next) : std::next(next);
    }
  }

  void tell_collecting(const std::string& key, const Value& value) {
    for (auto next = collecting_.begin(); next != collecting_.end();) {
      const uint64_t id = *next++;  // which may be taken out
      survive(id, [&] { tell_collecting(id, key, value); });
    }
  }

  void tell_collecting(uint64_t id, const std::string& key, const Value& value) {
    StoreConnection& client = *clients_.at(id);
    if (!client.take_missing(key, value)) return;
    if (client.complete()) {
      collecting_.erase(id);
      if (!client.send_entries()) close_client(id);
    } else if (client.due_ns() == 0) {
      const int64_t due_ns = now_ns() + kGather;
      due_.emplace_back(due_ns, id);
      client.set_due_ns(due_ns);
    }
  }

  void send_due(int64_t now) {
    while (!due_.empty() && due_.front().first <= now) {
      const auto [due_ns, id] = due_.front();
      due_.pop_front();
      // It may be gone, or have been told meanwhile.
      const auto found = clients_.find(id);
      if (found == clients_.end() || found->second->due_ns() != due_ns) continue;
      survive(id, [&, id = id] {
        if (!found->second->send_entries()) close_client(id);
      });
    }
  }

  bool handle_get(StoreConnection& client, const std::string& key) {
    if (const auto found = values_.find(key); found != values_.end()) return client.reply(found->second);
    client.await_key(key);
    parked_[key].push_back(client.id());
    return true;
  }

  bool handle_get_numbered(StoreConnection& client, bool wait, const std::string& prefix, const std::string& body) {
    if (body.size() % 4 != 0) return false;
    std::vector<int> numbers(body.size() / 4);
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(get_u32(&body[4 * i]));
    if (!NumberedKeys::ascend(numbers)) return false;
    NumberedKeys keys(prefix, numbers);
    for (const int number : numbers) {
      const auto found = values_.find(keys.key(number));
      const bool here = found != values_.end();
      if (!here && wait) continue;
      client.add_entry(number, here ? found->second : nullptr);
      keys.mark(number);
    }
    if (!keys.all_came()) collecting_.insert(client.id());
    client.await_numbers(std::move(keys));
    return client.send_entries();
  }

  void unpark(const StoreConnection& client) {
    collecting_.erase(client.id());
    const auto waiting = parked_.find(client.awaited_key());
    if (waiting == parked_.end()) return;
    std::vector<uint64_t>& ids = waiting->second;
    ids.erase(std::remove(ids.begin(), ids.end(), client.id()), ids.end());
    if (ids.empty()) parked_.erase(waiting);
  }

  const uint32_t fork_generation_ = fork_generation();
  std::vector<Socket> listeners_;
  const std::string secret_;
  const int port_;
  Socket stop_;
  std::atomic<uint64_t> requests_{0};
  std::thread thread_;

  // Of the thread alone, once it runs.
  Poller poller_{"rendezvous"};
  bool stopping_ = false;
  Watched on_stop_{[this](uint32_t) { stopping_ = true; }};
  std::vector<std::unique_ptr<Watched>> on_connection_;  // one for each listener
  std::unordered_map<uint64_t, std::unique_ptr<StoreConnection>> clients_;
  PendingIds pending_{{kMostPending, kHandshakeLimit}};  // clients that have not proved the secret
  std::unordered_map<std::string, Value> values_;
  std::unordered_map<std::string, uint32_t> begun_;  // job → its newest world whose ranks are all connected
  std::unordered_map<std::string, std::vector<uint64_t>> parked_;  // ids of those who wait for a key
  std::unordered_set<uint64_t> collecting_;                        // ids of those whose get_all lacks keys
  std::deque<std::pair<int64_t, uint64_t>> due_;                   // when to send what has arrived, and to whom
  uint64_t next_id_ = kNobody + 1;
};

// Listeners for every address of `host` on one port; empty with errno set when the port is taken somewhere.
std::vector<Socket> listen_at(const std::vector<SocketAddress>& addresses, int port) {
  std::vector<Socket> listeners;
  if (addresses.empty()) {
    if (Socket socket = listen_everywhere(port)) listeners.push_back(std::move(socket));
    return listeners;
  }
  for (SocketAddress address : addresses) {
    address.set_port(port);
    Socket socket = listen_on(address);
    if (!socket) {
      // "localhost" may stand for ::1 on a host that has none.
      if (errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT) continue;
      const int why = errno;
      listeners.clear();
      errno = why;
      return listeners;
    }
    if (port == 0) port = local_address(socket.fd()).port();
    listeners.push_back(std::move(socket));
  }
  return listeners;
}

}  // namespace

std::unique_ptr<StoreServer> StoreServer::listen(const std::string& host, int port, bool next_free,
                                                 const std::string& secret) {
  if (secret.empty())
    fail(ErrorKind::kInvalidArgument,
         "[rendezvous] a store server with an empty secret would serve anybody: give it the job's secret");
  occupy_standard_descriptors();
  std::vector<SocketAddress> addresses;
  if (!host.empty()) {
    std::string why;
    addresses = resolve(host, port, &why);
    if (addresses.empty()) fail(ErrorKind::kIo, "[rendezvous] cannot listen on '" + host + "': " + why);
    // The resolver may name an address once per protocol.
    const auto same = [](const SocketAddress& a, const SocketAddress& b) { return a.text() == b.text(); };
    addresses.erase(std::unique(addresses.begin(), addresses.end(), same), addresses.end());
  }
  const int last = !next_free || port == 0 ? port : std::min(port + kPortsTried - 1, 65535);
  for (int candidate = port; candidate <= last; ++candidate) {
    std::vector<Socket> listeners = listen_at(addresses, candidate);
    if (!listeners.empty()) return std::make_unique<TcpStoreServer>(std::move(listeners), secret);
    if (errno != EADDRINUSE)
      fail(ErrorKind::kIo, "[rendezvous] cannot listen on " + (host.empty() ? "every interface" : "'" + host + "'") +
                               ", port " + std::to_string(candidate) + ": " + error_text(errno));
  }
  const std::string which = port == last ? "port " + std::to_string(port) + " is"
                                         : "ports " + std::to_string(port) + " to " + std::to_string(last) + " are";
  fail(ErrorKind::kIo, "[rendezvous] " + which + " taken: set PERSEUS_MASTER_PORT or stop the other job");
}

}  // namespace perseus

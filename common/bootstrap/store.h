// How ranks find each other: a tiny shared key-value space. Implementations are thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"

namespace perseus {

class Store {
 public:
  using Interrupted = std::function<bool()>;
  // Gets the value of one of several keys that differ in a number.
  using OnValue = std::function<void(int number, const std::string& value)>;

  // For an answer that waits for no rank, on however busy a machine.
  static constexpr int64_t kAnswerTime = 5 * kSecond;
  // The deadline of such an answer for a rank that may be late already: not the store is to be blamed for that.
  static int64_t answer_by(int64_t deadline_ns) { return std::max(deadline_ns, now_ns() + kAnswerTime); }

  virtual ~Store() = default;
  // Make `key` readable for everybody. Setting a key again replaces it. Throws Error(kTimeout) when the server has not
  // answered by `deadline_ns` (base/clock.h), and Error(kIo) when it is gone. `interrupted`, when given, is asked about
  // every 100 ms; true ends the wait with Error(kAborted).
  virtual void set(const std::string& key, const std::string& value, int64_t deadline_ns,
                   const Interrupted& interrupted = {}) = 0;
  // Wait until `key` exists and return its value. Throws Error(kTimeout) at `deadline_ns`, naming the key; else as
  // set().
  virtual std::string get(const std::string& key, int64_t deadline_ns, const Interrupted& interrupted = {}) = 0;
  // The same for the keys prefix + "7" of all `numbers`, which must ascend, in one request: every value goes to
  // `on_value` once, soon after the key exists, in any order. What `on_value` throws ends the wait. Returns the numbers
  // of the keys that did not exist by the deadline.
  [[nodiscard]] virtual std::vector<int> get_all(const std::string& prefix, const std::vector<int>& numbers,
                                                 int64_t deadline_ns, const OnValue& on_value,
                                                 const Interrupted& interrupted = {}) = 0;
  // The same without waiting for keys: returns the numbers of those that do not exist now. Throws Error(kTimeout) when
  // the server has not answered by the deadline.
  [[nodiscard]] virtual std::vector<int> get_present(const std::string& prefix, const std::vector<int>& numbers,
                                                     int64_t deadline_ns, const OnValue& on_value,
                                                     const Interrupted& interrupted = {}) = 0;
};

// Ranks as threads of one process share one of these.
std::shared_ptr<Store> make_memory_store();

// A server that lives in this process until destroyed. Thread-safe.
class StoreServer {
 public:
  // Listens on `host` ("" = every interface); port 0 = any. When `port` is taken and `next_free`, takes the next free
  // one of the following 100, else throws Error(kIo) naming the port and the remedy. An empty secret is
  // Error(kInvalidArgument), as it is for clients.
  static std::unique_ptr<StoreServer> listen(const std::string& host, int port, bool next_free,
                                             const std::string& secret);
  virtual ~StoreServer() = default;
  virtual int port() const = 0;
  // How many requests clients have made so far.
  virtual uint64_t requests() const = 0;
};

// A client of such a server. Connects (retrying while refused) until deadline, proves the secret and checks that the
// server knows it too; Error(kIo) names the address, and says so when the secrets differ.
std::shared_ptr<Store> connect_store(const std::string& host, int port, const std::string& secret, int64_t deadline_ns,
                                     const std::function<bool()>& interrupted = {});

}  // namespace perseus

// How ranks find each other: a tiny shared key-value space. Implementations are thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace perseus {

class Store {
 public:
  virtual ~Store() = default;
  // Make `key` readable for everybody. Setting a key again replaces it.
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Wait until `key` exists and return its value. Throws Error(kTimeout) at `deadline_ns` (base/clock.h), naming the
  // key; Error(kIo) when the server is gone. `interrupted`, when given, is asked about every 100 ms; true ends the wait
  // with Error(kAborted).
  virtual std::string get(const std::string& key, int64_t deadline_ns,
                          const std::function<bool()>& interrupted = {}) = 0;
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
};

// A client of such a server. Connects (retrying while refused) until deadline, proves the secret and checks that the
// server knows it too; Error(kIo) names the address, and says so when the secrets differ.
std::shared_ptr<Store> connect_store(const std::string& host, int port, const std::string& secret, int64_t deadline_ns,
                                     const std::function<bool()>& interrupted = {});

}  // namespace perseus

// Opens one control connection to a lower rank: tries its addresses one after the other, each a little later than the
// one before, and keeps the first over which that rank answers and proves itself. Used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "net/poller.h"
#include "net/socket.h"
#include "topology/world.h"

namespace perseus {

class TcpConnector {
 public:
  using Done = std::function<void(Socket socket, std::string session)>;

  TcpConnector(Poller& poller, const World& world, int peer, std::vector<SocketAddress> candidates, Done done);
  ~TcpConnector();

  // Starts tries that are due and ends those that take too long. Call every few ms until done.
  void check_time();
  bool done() const { return done_; }
  int peer() const { return peer_; }
  // What became of the last try that failed: "10.0.0.5:4711: Connection refused". If none has, where one is under way,
  // and "" if none is.
  std::string trouble() const;

 private:
  class Attempt;
  friend class Attempt;

  void start(const SocketAddress& address, int64_t now);
  void end(Attempt* attempt, const std::string& why);
  void succeed(Attempt* attempt);
  // True for the first attempt that was answered: the others are ended, so that the peer sees one proof.
  bool choose(Attempt* attempt);

  Poller& poller_;
  const World& world_;
  const int peer_;
  const std::vector<SocketAddress> candidates_;
  Done on_done_;
  std::list<std::unique_ptr<Attempt>> attempts_;
  Attempt* chosen_ = nullptr;
  size_t next_ = 0;  // candidate
  int64_t next_start_ns_ = 0;
  bool done_ = false;
  std::string trouble_;
};

}  // namespace perseus

// Listens, and identifies a peer before it hands the connection on. Pending connections are limited in number, time
// and bytes. Used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "net/pending_connections.h"
#include "net/poller.h"
#include "net/socket.h"
#include "topology/world.h"
#include "transport/transport.h"

namespace perseus {

class TcpAcceptor {
 public:
  // Decides about and receives connections that have said who they are.
  struct Members {
    virtual ~Members() = default;
    // Whether `rank` may open a control connection now: "" = yes, else the reason why not.
    virtual std::string may_join(int rank) = 0;
    // The session of the control connection that `rank` has opened, null if there is none.
    virtual const std::string* session_with(int rank) = 0;
    virtual void on_side(int rank, Socket socket, std::string session) = 0;
    // "" = taken, else why not.
    virtual std::string on_data(int rank, Channel channel, Socket socket) = 0;
  };

  TcpAcceptor(Poller& poller, const World& world, Members& members, const Log& log);
  ~TcpAcceptor();

  void listen(Socket listener);
  // Closes pending connections that take too long. Call about every 100 ms.
  void check_time();
  // Why the last connection could not be accepted yet: an error number, 0 = it could.
  int shortage() const { return shortage_; }

 private:
  class Listener;
  class Pending;
  friend class Listener;
  friend class Pending;

  void accept_from(int listener);
  void pause();
  void drop(Pending* connection);
  void refuse(Pending* connection, const std::string& why);
  void welcome(Pending* connection);

  Poller& poller_;
  const World& world_;
  Members& members_;
  const Log& log_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  PendingConnections<std::unique_ptr<Pending>> pending_;
  int warnings_ = 0;
  int shortage_ = 0;  // of descriptors
  bool warned_of_shortage_ = false;
};

}  // namespace perseus

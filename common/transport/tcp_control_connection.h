// The control connection of two ranks: it carries control messages and heartbeats, and its end is the first sign of a
// peer's death. The thread that may use its TcpTransport may use it.
#pragma once

#include <functional>
#include <string>

#include "base/progress_lock.h"
#include "net/message_check.h"
#include "net/poller.h"
#include "net/socket.h"
#include "transport/tcp_link.h"

namespace perseus {

class TcpControlConnection : public PollHandler {
 public:
  // What the transport wants to know; both may be called from on_event() only.
  struct Listener {
    virtual ~Listener() = default;
    virtual void on_control_message(int peer, std::string text) = 0;
    virtual void on_gone(int peer, const std::string& why) = 0;
  };

  TcpControlConnection(Poller& poller, TcpTraffic& traffic, Listener& listener, int64_t& alive_ns, int me, int peer,
                       Socket socket, std::string session);
  // Sends what is queued if that does not block, and closes so that the peer can still read all of it.
  ~TcpControlConnection() override;

  // Makes the tickets of the pair's data connections, and the keys of their authentication codes.
  const std::string& session() const { return session_; }
  SocketAddress address() const { return peer_address(socket_.fd()); }

  void send_control_message(const std::string& message) PERSEUS_REQUIRES(progress_lock);
  void send_heartbeat() PERSEUS_REQUIRES(progress_lock);
  // Nothing more is sent. Has the peer's host acknowledged everything, or is the connection broken?
  bool finish() PERSEUS_REQUIRES(progress_lock);
  void on_event(uint32_t events) override;

 private:
  void queue(const std::string& payload);
  bool flush();  // false: broken, errno says why
  void receive();
  void lose(const std::string& why);

  Poller& poller_;
  TcpTraffic& traffic_;
  Listener& listener_;
  int64_t& alive_ns_;
  const int peer_;
  Socket socket_;
  const std::string session_;
  AuthenticationCode outgoing_code_, incoming_code_;
  std::string in_, out_;
  bool waits_to_write_ = false;
  bool lost_ = false;
};

}  // namespace perseus

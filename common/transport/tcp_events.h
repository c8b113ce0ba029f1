// The descriptors of one TCP transport that are not data connections: one epoll set and who is told. Used by one thread
// at a time.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "net/socket.h"

namespace perseus {

class TcpEventHandler {
 public:
  virtual ~TcpEventHandler() = default;
  virtual void on_event(uint32_t events) = 0;

 private:
  friend class TcpEvents;
  bool retired_ = false;
};

class TcpEvents {
 public:
  TcpEvents();  // throws Error(kIo)

  // Readable when something is to be done: may itself be watched.
  int fd() const { return epoll_.fd(); }
  // Level-triggered EPOLLIN, EPOLLOUT.
  void add(int fd, uint32_t events, TcpEventHandler* handler);
  void change(int fd, uint32_t events, TcpEventHandler* handler);
  void remove(int fd);
  // Frees the handler once no event of the current batch can name it; it gets no further events.
  void retire(std::unique_ptr<TcpEventHandler> handler);

  // Waits up to timeout_ms for the first event and tells handlers until nothing is left to tell.
  void run(int timeout_ms);

 private:
  Socket epoll_;
  std::vector<std::unique_ptr<TcpEventHandler>> retired_;
};

}  // namespace perseus

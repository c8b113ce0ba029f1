// Waiting for descriptors: an epoll set that tells a handler per descriptor, and a wait for a single one. A Poller is
// used by one thread at a time, with the exception of run_once().
#pragma once

#include <poll.h>
#include <sys/epoll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "net/socket.h"

namespace perseus {

class PollHandler {
 public:
  virtual ~PollHandler() = default;
  virtual void on_event(uint32_t events) = 0;

 private:
  friend class Poller;
  bool retired_ = false;
  std::unique_ptr<PollHandler> retired_before_;
};

class Poller {
 public:
  // `component` begins the messages of errors: "[tcp] epoll_ctl: …". Throws Error(kIo).
  explicit Poller(std::string component);
  ~Poller() { free_retired(); }
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Readable when something is to be done: may itself be watched.
  int fd() const { return epoll_.fd(); }
  // EPOLLIN, EPOLLOUT …; level-triggered unless EPOLLET is among them. Throws Error(kIo).
  void add(int fd, uint32_t events, PollHandler* handler);
  void change(int fd, uint32_t events, PollHandler* handler);
  void remove(int fd);
  // Frees the handler once no event of the current batch can name it; it gets no further events. Takes no memory.
  void retire(std::unique_ptr<PollHandler> handler);

  // Waits up to timeout_ms (-1 = for ever) for the first event and tells handlers until nothing is left to tell.
  void run(int timeout_ms);
  // The same for one batch of events, for edges; false if there was none. Several threads may call it at once where
  // handlers allow that and none is ever retired.
  bool run_once(int timeout_ms);

 private:
  void free_retired();

  const std::string component_;
  Socket epoll_;
  std::unique_ptr<PollHandler> retired_;  // the last, which holds those before it
};

enum class Wait { kReady, kTimeout, kInterrupted };

// Waits until `fd` is ready for `events` (POLLIN, POLLOUT), or has failed. `interrupted`, when given, is asked about
// every 100 ms; true ends the wait.
Wait wait_for(int fd, short events, int64_t deadline_ns, const std::function<bool()>& interrupted);

}  // namespace perseus

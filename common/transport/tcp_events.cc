// epoll behind TcpEvents.
#include "transport/tcp_events.h"

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/descriptors.h"
#include "base/error.h"

namespace perseus {

TcpEvents::TcpEvents() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) fail(ErrorKind::kIo, "[tcp] epoll_create1: " + error_text(errno));
}

void TcpEvents::add(int fd, uint32_t events, TcpEventHandler* handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  if (::epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0)
    fail(ErrorKind::kIo, std::string("[tcp] epoll_ctl: ") + std::strerror(errno));
}

void TcpEvents::change(int fd, uint32_t events, TcpEventHandler* handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  ::epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, fd, &event);
}

void TcpEvents::remove(int fd) { ::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr); }

void TcpEvents::retire(std::unique_ptr<TcpEventHandler> handler) {
  handler->retired_ = true;
  retired_.push_back(std::move(handler));
}

void TcpEvents::run(int timeout_ms) {
  constexpr int kBatch = 64;
  // Bounded: peers that never stop sending must not keep the progress engine here.
  for (int round = 0; round < 64; ++round) {
    epoll_event events[kBatch];
    const int n = ::epoll_wait(epoll_.fd(), events, kBatch, round == 0 ? timeout_ms : 0);
    for (int i = 0; i < n; ++i) {
      auto* handler = static_cast<TcpEventHandler*>(events[i].data.ptr);
      if (!handler->retired_) handler->on_event(events[i].events);
    }
    retired_.clear();
    // Until there is nothing: whoever watches this set is told of what becomes ready, not of what still is.
    if (n <= 0) return;
  }
}

}  // namespace perseus

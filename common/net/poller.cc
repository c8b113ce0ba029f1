// epoll behind Poller, poll behind wait_for.
#include "net/poller.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/descriptors.h"
#include "base/error.h"

namespace perseus {

Poller::Poller(std::string component)
    : component_(std::move(component)), epoll_([] { return ::epoll_create1(EPOLL_CLOEXEC); }) {
  if (!epoll_) fail(ErrorKind::kIo, "[" + component_ + "] epoll_create1: " + error_text(errno));
}

void Poller::add(int fd, uint32_t events, PollHandler* handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  if (::epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0)
    fail(ErrorKind::kIo, "[" + component_ + "] epoll_ctl: " + std::strerror(errno));
}

void Poller::change(int fd, uint32_t events, PollHandler* handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  ::epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::remove(int fd) { ::epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr); }

void Poller::retire(std::unique_ptr<PollHandler> handler) {
  handler->retired_ = true;
  handler->retired_before_ = std::move(retired_);
  retired_ = std::move(handler);
}

void Poller::free_retired() {
  while (retired_) retired_ = std::move(retired_->retired_before_);
}

void Poller::run(int timeout_ms) {
  // Bounded: peers that never stop sending must not keep the caller here. Else until there is nothing: whoever watches
  // this set is told of what becomes ready, not of what still is.
  for (int batch = 0; batch < 64; ++batch)
    if (!run_once(batch == 0 ? timeout_ms : 0)) return;
}

bool Poller::run_once(int timeout_ms) {
  constexpr int kBatch = 64;
  epoll_event events[kBatch];
  const int n = ::epoll_wait(epoll_.fd(), events, kBatch, timeout_ms);
  for (int i = 0; i < n; ++i) {
    auto* handler = static_cast<PollHandler*>(events[i].data.ptr);
    if (!handler->retired_) handler->on_event(events[i].events);
  }
  free_retired();
  return n > 0;
}

Wait wait_for(int fd, short events, int64_t deadline_ns, const std::function<bool()>& interrupted) {
  constexpr int64_t kSlice = 100 * kMillisecond;
  for (;;) {
    const int64_t left = deadline_ns - now_ns();
    pollfd entry{fd, events, 0};
    const int timeout_ms = static_cast<int>((std::clamp<int64_t>(left, 0, kSlice) + kMillisecond - 1) / kMillisecond);
    if (::poll(&entry, 1, timeout_ms) > 0) return Wait::kReady;
    if (left <= 0) return Wait::kTimeout;
    if (interrupted && interrupted()) return Wait::kInterrupted;
  }
}

}  // namespace perseus

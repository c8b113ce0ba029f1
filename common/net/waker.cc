// epoll, eventfd and timerfd behind Waker.
#include "net/waker.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/descriptors.h"
#include "base/error.h"

namespace perseus {
namespace {

Socket checked(int fd, const char* call) {
  if (fd < 0) fail(ErrorKind::kIo, std::string("[waker] ") + call + ": " + error_text(errno));
  return Socket(fd);
}

void write_one(int fd) {
  const uint64_t one = 1;
  // The counter saturating means that the sleeper has been told already.
  [[maybe_unused]] const ssize_t written = ::write(fd, &one, sizeof one);
}

}  // namespace

void Doorbell::ring_now() const {
  // Only the first of several ringers pays the system call.
  if (sleeping->exchange(0, std::memory_order_relaxed) != 0) write_one(fd);
}

Waker::Waker() {
  epoll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  event_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  timer_ = checked(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create");
  watch(event_.fd());
  watch(timer_.fd());
}

void Waker::watch(int fd) {
  epoll_event event{};
  // Edges: descriptors that nobody reads right now must not keep the sleeper awake.
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0)
    fail(ErrorKind::kIo, std::string("[waker] epoll_ctl: ") + std::strerror(errno));
}

void Waker::unwatch(int fd) { epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr); }

void Waker::collect(int timeout_ms) {
  epoll_event events[16];
  const int n = epoll_wait(epoll_.fd(), events, 16, timeout_ms);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.fd == timer_.fd()) {
      uint64_t fired;
      if (::read(timer_.fd(), &fired, sizeof fired) > 0) timer_at_.store(0, std::memory_order_relaxed);
    } else {
      events_.store(true, std::memory_order_relaxed);
    }
  }
}

void Waker::wait(int64_t timeout_ns) {
  collect(static_cast<int>((timeout_ns + kMillisecond - 1) / kMillisecond));
  cancel_sleep();
}

bool Waker::take_events() {
  if (events_.load(std::memory_order_relaxed)) {
    events_.store(false, std::memory_order_relaxed);
    return true;
  }
  collect(0);
  return events_.exchange(false, std::memory_order_relaxed);
}

void Waker::arm_timer(int64_t delay_ns) {
  const int64_t at = now_ns() + delay_ns;
  const int64_t set = timer_at_.load(std::memory_order_relaxed);
  // A moment long past was consumed by nobody yet (or its reader is just about to clear it): set anew.
  if (set != 0 && set <= at && set > at - delay_ns - 10 * kMillisecond) return;
  timer_at_.store(at, std::memory_order_relaxed);
  itimerspec when{};
  when.it_value.tv_sec = at / kSecond;
  when.it_value.tv_nsec = at % kSecond;
  timerfd_settime(timer_.fd(), TFD_TIMER_ABSTIME, &when, nullptr);
}

void Waker::kick() { write_one(event_.fd()); }

}  // namespace perseus

// eventfd and timerfd behind Waker.
#include "net/waker.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/clock.h"
#include "base/descriptors.h"
#include "base/error.h"

namespace perseus {
namespace {

// Edges: descriptors that nobody reads right now must not keep the sleeper awake.
constexpr uint32_t kEdges = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

Socket checked(const char* call, const std::function<int()>& open) {
  Socket made(open);
  if (!made) fail(ErrorKind::kIo, std::string("[waker] ") + call + ": " + error_text(errno));
  return made;
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
  event_ = checked("eventfd", [] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
  timer_.fd = checked("timerfd_create", [] { return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK); });
  watch(event_.fd());
  poller_.add(timer_.fd.fd(), kEdges, &timer_);
}

void Waker::watch(int fd) { poller_.add(fd, kEdges, &events_); }

void Waker::unwatch(int fd) { poller_.remove(fd); }

void Waker::Timer::on_event(uint32_t) {
  uint64_t fired;
  if (::read(fd.fd(), &fired, sizeof fired) > 0) at.store(0, std::memory_order_relaxed);
}

void Waker::wait(int64_t timeout_ns) {
  // An event that take_events() has not told of does not come again.
  const bool told = !events_.set.load(std::memory_order_relaxed);
  poller_.run_once(told ? static_cast<int>((timeout_ns + kMillisecond - 1) / kMillisecond) : 0);
  cancel_sleep();
}

bool Waker::take_events() {
  if (events_.set.load(std::memory_order_relaxed)) {
    events_.set.store(false, std::memory_order_relaxed);
    return true;
  }
  poller_.run_once(0);
  return events_.set.exchange(false, std::memory_order_relaxed);
}

void Waker::arm_timer(int64_t delay_ns) {
  const int64_t at = now_ns() + delay_ns;
  const int64_t set = timer_.at.load(std::memory_order_relaxed);
  // A moment long past was consumed by nobody yet (or its reader is just about to clear it): set anew.
  if (set != 0 && set <= at && set > at - delay_ns - 10 * kMillisecond) return;
  timer_.at.store(at, std::memory_order_relaxed);
  itimerspec when{};
  when.it_value.tv_sec = at / kSecond;
  when.it_value.tv_nsec = at % kSecond;
  timerfd_settime(timer_.fd.fd(), TFD_TIMER_ABSTIME, &when, nullptr);
}

void Waker::kick() { write_one(event_.fd()); }

}  // namespace perseus

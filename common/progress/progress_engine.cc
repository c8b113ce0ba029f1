// The progress lock, the engine thread and the ways to sleep. States of the engine thread:
//   sleeping  in the Waker, without the lock: any event, doorbell or the Waker's timer wakes it and it drives
//   driving   holds the lock
//   standby   a caller drives; sleeps on a timer of its own, which callers set as they leave
// Publishing work and looking at the state are ordered by sequentially consistent fences on both sides, so either the
// submitter sees a sleeper and sets a timer, or the sleeper's last look sees the work.
#include "progress/progress_engine.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/descriptors.h"
#include "base/start_thread.h"

namespace perseus {
namespace {

// After this long without a driving caller the engine thread takes over listening.
constexpr int64_t kTakeOver = 2 * kMillisecond;
constexpr int64_t kSlice = 100 * kMillisecond;
constexpr int kYields = 16;
// A driving engine thread steps back as soon as it sees a waiter: worth waiting for awake.
constexpr int64_t kHandOver = 50 * kMicrosecond;
// A spinner that has looked in vain for this long offers its core to whoever needs it at every further look: with the
// peer itself waiting for a core, spinning on would only keep it from answering.
constexpr int64_t kPoliteAfter = 5 * kMicrosecond;

}  // namespace

// A caller's hold on the progress lock, which it has taken: given back whatever happens meanwhile.
class PERSEUS_SCOPED_CAPABILITY ProgressEngine::Hold {
 public:
  Hold(ProgressEngine* engine, void (ProgressEngine::*give_back)()) PERSEUS_REQUIRES(progress_lock)
      : engine_(engine), give_back_(give_back) {}
  // The analysis does not see which function is called.
  ~Hold() PERSEUS_RELEASE() PERSEUS_NO_THREAD_ANALYSIS { (engine_->*give_back_)(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  ProgressEngine* const engine_;
  void (ProgressEngine::* const give_back_)();
};

ProgressEngine::ProgressEngine(Waker& waker, const Settings& settings, ProgressWork& work)
    : waker_(waker), settings_(settings), work_(work) {
  standby_timer_ = Socket([] { return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC); });
  if (!standby_timer_) fail(ErrorKind::kIo, "[engine] timerfd_create: " + error_text(errno));
  thread_ = start_thread("engine", [this] { engine_loop(); });
}

ProgressEngine::~ProgressEngine() { stop(); }

void ProgressEngine::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true);
  rouse();
  thread_.join();
}

void ProgressEngine::rouse() {
  waker_.kick();
  standby_at_.store(0, std::memory_order_relaxed);
  arm_standby(1);
}

// ---- the lock ----

// See give_up().
bool ProgressEngine::seize() PERSEUS_NO_THREAD_ANALYSIS {
  return !taken_.load(std::memory_order_relaxed) && !taken_.exchange(true, std::memory_order_acquire);
}

// A conjunction is more than the analysis follows.
bool ProgressEngine::try_take() PERSEUS_NO_THREAD_ANALYSIS {
  return wanted_.load(std::memory_order_relaxed) == 0 && seize();
}

bool ProgressEngine::pass(bool eager) {
  bool moved = true;  // a failure completes what was in flight
  guard([&]() PERSEUS_REQUIRES(progress_lock) { moved = work_.pass(eager); });
  if (completed_) {
    completed_ = false;
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with wait_for_holder(): it sees done, or we see it
    wake_waiters();
  }
  return moved;
}

void ProgressEngine::on_exception(const Error& error, Status* outcome) noexcept {
  if (outcome != nullptr) {
    outcome->ok = false;
    outcome->kind = error.kind();
    try {
      outcome->message = error.what();
    } catch (const std::bad_alloc&) {
      outcome->message.clear();  // the kind has to do
    }
  }
  work_.on_failure(error);
}

void ProgressEngine::wake_waiters() {
  if (waiters_.load(std::memory_order_seq_cst) == 0) return;
  const MutexLock lock(mutex_);
  changed_.notify_all();
}

// The lock is a plain atomic word, which the analysis does not know.
void ProgressEngine::give_up() PERSEUS_NO_THREAD_ANALYSIS {
  taken_.store(false, std::memory_order_seq_cst);
  wake_waiters();
}

void ProgressEngine::leave() {
  const bool busy = work_.busy();
  give_up();
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with submitted(): it saw the lock taken, or we see it
  if (busy || work_.has_submissions()) submitted(false);
}

void ProgressEngine::submitted(bool urgent) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fences before the engine thread's last look
  switch (state_.load(std::memory_order_relaxed)) {
    case EngineState::kSleeping:
      if (urgent) waker_.kick();
      else waker_.arm_timer(settings_.pick_up_ns);
      break;
    case EngineState::kStandby:
      if (caller_sleeps_.load(std::memory_order_relaxed)) {
        waker_.arm_timer(urgent ? 1 : settings_.pick_up_ns);
      } else if (!taken_.load(std::memory_order_relaxed)) {
        pick_up_.store(true, std::memory_order_relaxed);
        arm_standby(urgent ? 1 : settings_.pick_up_ns);
      }
      break;
    case EngineState::kDriving:
      break;
  }
}

void ProgressEngine::arm_standby(int64_t delay_ns) {
  const int64_t at = now_ns() + delay_ns;
  const int64_t set = standby_at_.load(std::memory_order_relaxed);
  if (set != 0 && set <= at) return;
  standby_at_.store(at, std::memory_order_relaxed);
  itimerspec when{};
  when.it_value.tv_sec = at / kSecond;
  when.it_value.tv_nsec = at % kSecond;
  timerfd_settime(standby_timer_.fd(), TFD_TIMER_ABSTIME, &when, nullptr);
}

// ---- callers ----

void ProgressEngine::nudge() {
  if (!try_take()) return;
  const Hold hold(this, &ProgressEngine::leave);
  pass(true);
}

void ProgressEngine::take() {
  // A caller drives until its own request is done, which may be what is to be brought about with the lock.
  wanted_.fetch_add(1, std::memory_order_seq_cst);
  while (!seize()) {
    waker_.kick();
    wait_for_holder([] { return false; }, now_ns() + kMillisecond);
  }
  wanted_.fetch_sub(1, std::memory_order_relaxed);
}

// See try_take().
bool ProgressEngine::take_over(const std::function<bool()>& done) PERSEUS_NO_THREAD_ANALYSIS {
  if (try_take()) return true;
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  const int64_t until = now_ns() + kHandOver;
  bool taken = false;
  while (!done() && !(taken = try_take()) && now_ns() < until) sched_yield();
  waiters_.fetch_sub(1, std::memory_order_relaxed);
  return taken;
}

bool ProgressEngine::wait(const std::function<bool()>& done, int64_t deadline_ns) {
  while (!done()) {
    if (!take_over(done)) {
      if (!done()) wait_for_holder(done, deadline_ns);
    } else {
      // Peers need not ring while we look for ourselves, and the engine thread stands by: did it keep listening between
      // two calls of a busy caller, every message would wake it for nothing.
      const Hold hold(this, &ProgressEngine::step_back);
      waker_.cancel_sleep();
      if (state_.load(std::memory_order_relaxed) == EngineState::kSleeping) waker_.kick();
      drive(done, deadline_ns);
    }
    if (now_ns() >= deadline_ns) break;
  }
  return done();
}

// Looks once more soon; false when it has done so in vain for long enough. *until: 0 before the first time.
bool ProgressEngine::spin(int64_t now, int64_t* until) const {
  if (*until == 0) *until = now + settings_.spin_ns;
  if (now >= *until) {
    *until = 0;
    return false;
  }
  if (now > *until - settings_.spin_ns + kPoliteAfter) sched_yield();
  else cpu_relax();
  return true;
}

void ProgressEngine::drive(const std::function<bool()>& done, int64_t deadline_ns) {
  int64_t spin_until = 0;
  while (!done() && wanted_.load(std::memory_order_relaxed) == 0) {
    if (pass(true)) {
      spin_until = 0;
      continue;
    }
    if (done()) break;
    const int64_t now = now_ns();
    if (now >= deadline_ns) break;
    if (!spin(now, &spin_until)) sleep_as_caller(std::min(deadline_ns - now, kSlice));
  }
}

void ProgressEngine::step_back() {
  left_ns_.store(now_ns(), std::memory_order_relaxed);
  if (state_.load(std::memory_order_relaxed) == EngineState::kSleeping) {
    // It listens again: peers must ring from here on, and what came meanwhile must be seen.
    waker_.prepare_sleep();
    for (int i = 0; i < 4 && pass(false); ++i) continue;
  }
  leave();
  // It may have gone on standby at any moment, even just now; then somebody must tell it to listen again.
  if (state_.load(std::memory_order_seq_cst) == EngineState::kStandby) arm_standby(kTakeOver);
}

void ProgressEngine::sleep_as_caller(int64_t timeout_ns) {
  // Only one thread may sleep in the Waker, else an event could wake the wrong one.
  if (state_.load(std::memory_order_seq_cst) == EngineState::kSleeping) {
    waker_.kick();
    while (state_.load(std::memory_order_acquire) == EngineState::kSleeping) sched_yield();
  }
  if (settings_.spin_ns == 0) {
    // More ranks than cores: let a peer run; it may be all that is needed.
    for (int i = 0; i < kYields; ++i) {
      sched_yield();
      if (pass(true)) return;
    }
  }
  caller_sleeps_.store(true, std::memory_order_relaxed);
  waker_.prepare_sleep();
  if (pass(true)) {
    waker_.cancel_sleep();
  } else {
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    waker_.wait(timeout_ns);
  }
  caller_sleeps_.store(false, std::memory_order_relaxed);
}

void ProgressEngine::wait_for_holder(const std::function<bool()>& done, int64_t deadline_ns) {
  const MutexLock lock(mutex_);
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with pass() and leave()
  const int64_t left = std::min(std::max<int64_t>(deadline_ns - now_ns(), 0), kSlice);
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(left);
  while (!done() && taken_.load() && changed_.wait_until(mutex_, end)) continue;
  waiters_.fetch_sub(1, std::memory_order_relaxed);
}

// ---- the engine thread ----

void ProgressEngine::engine_loop() {
  pthread_setname_np(pthread_self(), "perseus-engine");
  while (!stop_.load()) {
    if (try_take()) engine_drives();
    else engine_standby();
  }
}

// Makes progress until there is nothing to do; false when somebody else wants to drive, or it is to stop.
bool ProgressEngine::engine_drive() {
  state_.store(EngineState::kDriving, std::memory_order_seq_cst);
  int64_t spin_until = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    const bool awaited = work_.awaited();
    if (pass(awaited)) {
      spin_until = 0;
      continue;
    }
    if (waiters_.load(std::memory_order_relaxed) > 0) return false;  // a blocked caller drives better
    if (awaited && spin(now_ns(), &spin_until)) continue;
    waker_.prepare_sleep();
    state_.store(EngineState::kSleeping, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with submitted()
    if (!pass(false)) return true;
    state_.store(EngineState::kDriving, std::memory_order_relaxed);
  }
  return false;
}

// Drives, and sleeps in the Waker without the lock where there is nothing to do; returns when somebody else drives.
void ProgressEngine::engine_drives() {
  while (engine_drive()) {
    give_up();
    // stop()'s kick may have been taken by the last look.
    waker_.wait(stop_.load() ? 0 : settings_.longest_sleep_ns);
    if (stop_.load() || !try_take()) {
      state_.store(EngineState::kStandby, std::memory_order_seq_cst);
      return;
    }
  }
  state_.store(EngineState::kStandby, std::memory_order_seq_cst);
  waker_.cancel_sleep();
  leave();
}

void ProgressEngine::engine_standby() {
  state_.store(EngineState::kStandby, std::memory_order_seq_cst);
  for (;;) {
    // A caller that left before it could see our state set no timer.
    if (!taken_.load(std::memory_order_seq_cst)) {
      const int64_t since = now_ns() - left_ns_.load(std::memory_order_relaxed);
      if (since >= kTakeOver || pick_up_.exchange(false, std::memory_order_relaxed)) return;
      arm_standby(kTakeOver - since);
    }
    pollfd entry{standby_timer_.fd(), POLLIN, 0};
    // A driving caller sets the timer as it leaves; look again now and then all the same.
    const bool fired = ::poll(&entry, 1, 1000) > 0;
    if (fired) {
      uint64_t count;
      [[maybe_unused]] const ssize_t got = ::read(standby_timer_.fd(), &count, sizeof count);
      standby_at_.store(0, std::memory_order_seq_cst);
    }
    if (stop_.load()) return;
  }
}

}  // namespace perseus

// The progress engine: one thread at a time holds the progress lock and polls everything in flight. A blocked caller
// drives progress itself; when nobody is blocked, the engine thread does, woken by events of the Waker or by a timer.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <new>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "base/progress_lock.h"
#include "net/socket.h"
#include "net/waker.h"

namespace perseus {

// What makes progress.
class ProgressWork {
 public:
  virtual ~ProgressWork() = default;
  // One pass over everything in flight; true when anything moved. `eager`: a caller is waiting. What it throws becomes
  // the failure.
  virtual bool pass(bool eager) PERSEUS_REQUIRES(progress_lock) = 0;
  // Everything ends with this cause. Called once for each exception, so maybe again.
  virtual void on_failure(const Error& cause) noexcept PERSEUS_REQUIRES(progress_lock) = 0;
  // Is there work that must be driven soon although nobody waits?
  virtual bool busy() noexcept PERSEUS_REQUIRES(progress_lock) = 0;
  // Has anything been submitted that no pass has taken over yet? Any thread.
  virtual bool has_submissions() const noexcept = 0;
  // Is what is under way all that somebody waits for, who does not drive? Any thread.
  virtual bool awaited() const noexcept = 0;
};

class ProgressEngine {
 public:
  struct Settings {
    // How long a blocked caller looks for news before it sleeps; 0 also means: yield the core first.
    int64_t spin_ns = 0;
    int64_t pick_up_ns = 0;              // how long work that nobody drives waits for the engine thread
    int64_t longest_sleep_ns = kSecond;  // of the engine thread
  };
  // Its thread calls `work` from here on.
  ProgressEngine(Waker& waker, const Settings& settings, ProgressWork& work);
  ~ProgressEngine();

  // Something was submitted: see to it that somebody drives within pick_up_ns, or at once when `urgent`.
  void submitted(bool urgent);
  // Drives, or waits for whoever drives, until done() or `deadline_ns`; returns done().
  bool wait(const std::function<bool()>& done, int64_t deadline_ns) PERSEUS_EXCLUDES(progress_lock);
  // One pass if nobody drives.
  void nudge() PERSEUS_EXCLUDES(progress_lock);
  // Handles were completed: callers that do not drive may be waiting for them.
  void completed() PERSEUS_REQUIRES(progress_lock) { completed_ = true; }
  // The one place where exceptions of a pass stop: runs `action`, and tells the work of what it throws, and `outcome`
  // where there is one. True when it threw nothing.
  template <class Action>
  bool guard(const Action& action, Status* outcome = nullptr) noexcept PERSEUS_REQUIRES(progress_lock);
  // Ends the engine thread. Waits go on working.
  void stop();

  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  friend class ProgressLock;
  enum class EngineState { kStandby, kDriving, kSleeping };
  class Hold;

  bool seize() PERSEUS_TRY_ACQUIRE(true, progress_lock);
  bool try_take() PERSEUS_TRY_ACQUIRE(true, progress_lock);
  void take() PERSEUS_ACQUIRE(progress_lock);
  bool take_over(const std::function<bool()>& done) PERSEUS_TRY_ACQUIRE(true, progress_lock);
  void give_up() PERSEUS_RELEASE(progress_lock);
  void leave() PERSEUS_RELEASE(progress_lock);
  void step_back() PERSEUS_RELEASE(progress_lock);
  void drive(const std::function<bool()>& done, int64_t deadline_ns) PERSEUS_REQUIRES(progress_lock);
  bool pass(bool eager) PERSEUS_REQUIRES(progress_lock);
  void on_exception(const Error& error, Status* outcome) noexcept PERSEUS_REQUIRES(progress_lock);
  bool spin(int64_t now, int64_t* until) const;
  void wait_for_holder(const std::function<bool()>& done, int64_t deadline_ns);
  void wake_waiters();
  void engine_loop();
  bool engine_drive() PERSEUS_REQUIRES(progress_lock);
  void engine_drives() PERSEUS_RELEASE(progress_lock);
  void engine_standby();
  void arm_standby(int64_t delay_ns);
  void rouse();
  void sleep_as_caller(int64_t timeout_ns) PERSEUS_REQUIRES(progress_lock);

  Waker& waker_;
  const Settings settings_;
  ProgressWork& work_;
  const Error out_of_memory_{ErrorKind::kInternal, "[engine] std::bad_alloc: this process is out of memory"};

  std::atomic<bool> taken_{false};  // the progress lock
  std::atomic<int> wanted_{0};      // by take(), which goes before everybody else
  bool completed_ PERSEUS_GUARDED_BY(progress_lock) = false;
  std::atomic<int> waiters_{0};
  Mutex mutex_;  // guards nothing: a waiter's look at the atomics and its sleep are one step to wake_waiters()
  ConditionVariable changed_;

  std::atomic<EngineState> state_{EngineState::kStandby};
  std::atomic<bool> caller_sleeps_{false};
  // The standby timer was set because there is work, not only to take over listening.
  std::atomic<bool> pick_up_{false};
  std::atomic<int64_t> standby_at_{0};
  std::atomic<int64_t> left_ns_{0};  // when a caller last drove
  Socket standby_timer_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> sleeps_{0};
  std::thread thread_;
};

// The progress lock, held while this lives: no pass runs meanwhile, and callers that drive step back for it. Ends with
// a pass, unless an exception ends it.
class PERSEUS_SCOPED_CAPABILITY ProgressLock {
 public:
  explicit ProgressLock(ProgressEngine& engine) PERSEUS_ACQUIRE(progress_lock)
      : engine_(engine), exceptions_(std::uncaught_exceptions()) {
    engine_.take();
  }
  ~ProgressLock() PERSEUS_RELEASE() {
    if (std::uncaught_exceptions() == exceptions_) engine_.pass(true);  // also tells waiters what was completed
    engine_.leave();
  }
  ProgressLock(const ProgressLock&) = delete;
  ProgressLock& operator=(const ProgressLock&) = delete;

 private:
  ProgressEngine& engine_;
  const int exceptions_;
};

template <class Action>
bool ProgressEngine::guard(const Action& action, Status* outcome) noexcept {
  try {
    action();
    return true;
  } catch (const Error& error) {
    on_exception(error, outcome);
  } catch (const std::bad_alloc&) {
    on_exception(out_of_memory_, outcome);
  } catch (const std::exception& error) {
    on_exception(Error(ErrorKind::kInternal, std::string("[engine] ") + error.what()), outcome);
  }
  return false;
}

}  // namespace perseus

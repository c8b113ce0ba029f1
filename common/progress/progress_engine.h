// Who drives: one thread at a time holds the token and polls everything in flight. A blocked caller drives itself; when
// nobody is blocked, the engine thread does, woken by events of the Waker or by a timer. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "net/waker.h"

namespace perseus {

class Driver {
 public:
  // None of these may throw.
  struct Callbacks {
    // One pass over everything in flight; true when anything moved. Token held. eager: a caller is waiting.
    std::function<bool(bool eager)> pass;
    // Is there work that must be driven soon although nobody waits? Token held.
    std::function<bool()> busy;
    // Has anything been submitted that no pass has taken over yet? Any thread.
    std::function<bool()> has_submissions;
    // Is what is under way all that somebody waits for, who does not drive? Any thread.
    std::function<bool()> awaited;
  };
  struct Settings {
    int64_t spin_ns =
        0;  // how long a blocked caller looks for news before it sleeps; 0 also means: yield the core first
    int64_t pick_up_ns = 0;  // how long work without a driver waits for the engine thread
  };
  Driver(Waker& waker, const Settings& settings, Callbacks callbacks);
  ~Driver();

  // Something was submitted: see to it that somebody drives within pick_up_ns, or at once when `urgent`.
  void submitted(bool urgent);
  // Drives, or waits for whoever drives, until done() or `deadline_ns`; returns done().
  bool wait(const std::function<bool()>& done, int64_t deadline_ns);
  // One pass if nobody drives.
  void nudge();
  // Calls `action` with the token held, so that no pass runs meanwhile. Callers that drive step back for it. What the
  // action throws reaches the caller.
  void exclusively(const std::function<void()>& action);
  // Handles were completed: callers that do not drive may be waiting for them. Token held.
  void completed() { completed_ = true; }
  // Ends the engine thread. Waits go on working.
  void stop();

  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }

 private:
  enum class EngineState { kStandby, kDriving, kSleeping };

  // A caller's hold on the progress lock, which it has taken: given back whatever happens meanwhile.
  class Hold {
   public:
    Hold(Driver* driver, void (Driver::*give_back)()) : driver_(driver), give_back_(give_back) {}
    ~Hold() { (driver_->*give_back_)(); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    Driver* const driver_;
    void (Driver::* const give_back_)();
  };

  bool seize();
  bool try_take();
  bool take_over(const std::function<bool()>& done);
  void leave();
  void drive(const std::function<bool()>& done, int64_t deadline_ns);
  void step_back();
  bool pass(bool eager);
  bool spin(int64_t now, int64_t* until) const;
  void wait_for_driver(const std::function<bool()>& done, int64_t deadline_ns);
  void engine_loop();
  void engine_drive();
  void engine_standby();
  void arm_standby(int64_t delay_ns);
  void rouse();
  void sleep_as_caller(int64_t timeout_ns);

  Waker& waker_;
  const Settings settings_;
  const Callbacks callbacks_;

  std::atomic<bool> taken_{false};
  std::atomic<int> wanted_{0};  // by exclusively(), which goes before everybody else
  bool completed_ = false;      // token held
  std::atomic<int> waiters_{0};
  std::mutex mutex_;
  std::condition_variable changed_;

  std::atomic<EngineState> state_{EngineState::kStandby};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> pick_up_{
      false};  // the standby timer was set because there is work, not only to take over listening
  std::atomic<int64_t> standby_at_{0};
  std::atomic<int64_t> left_ns_{0};  // when a caller last drove
  int standby_timer_ = -1;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> sleeps_{0};
  std::thread thread_;
};

}  // namespace perseus

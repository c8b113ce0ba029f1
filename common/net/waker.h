// Sleeping until something may have changed, and waking a sleeper of this host: one poller, one doorbell and one timer
// per Context. One thread at a time sleeps here; `ring` and `arm_timer` may be called by any thread, `ring` in
// any process that holds the doorbell.
#pragma once

#include <atomic>
#include <cstdint>

#include "net/poller.h"
#include "net/socket.h"

namespace perseus {

// What others need in order to wake a Context: the flag it raises before sleeping and an eventfd.
struct Doorbell {
  std::atomic<uint32_t>* sleeping = nullptr;
  int fd = -1;

  // Call after publishing whatever the sleeper waits for. Pairs with the fence in Waker::prepare_sleep: either the
  // sleeper sees what was published when it looks once more, or we see its flag.
  void ring() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (sleeping->load(std::memory_order_relaxed) != 0) ring_now();
  }
  void ring_now() const;
};

class Waker {
 public:
  Waker();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  Doorbell doorbell() const { return Doorbell{sleeping_, event_.fd()}; }
  int event_fd() const { return event_.fd(); }
  // Moves the flag into memory that peers can see. Before anybody sleeps or rings.
  void place_flag(std::atomic<uint32_t>* flag) { sleeping_ = flag; }

  // Report edges (readable, writable, hang-up) of `fd` from now on; whoever reads it must read until EAGAIN.
  void watch(int fd);
  void unwatch(int fd);

  // Raise the flag; then look once more at everything; then wait() or cancel_sleep().
  void prepare_sleep() {
    sleeping_->store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with Doorbell::ring
  }
  void cancel_sleep() { sleeping_->store(0, std::memory_order_relaxed); }
  // Sleeps until the doorbell rings, a watched descriptor has an edge, the timer fires, a signal arrives or the timeout
  // passes. Remembers events for take_events().
  void wait(int64_t timeout_ns);
  // Has a watched descriptor had an edge, or the doorbell rung, since the last call? Looks without sleeping.
  bool take_events();

  // Ends a wait() about `delay_ns` from now, unless the timer is already set to an earlier moment. A set timer costs
  // the caller no wake-up of another thread, only this one system call.
  void arm_timer(int64_t delay_ns);
  // Ends a wait() at once.
  void kick();

 private:
  // Somebody may look for events while another sleeps: the handlers touch atomics alone.
  struct Timer final : PollHandler {
    void on_event(uint32_t) override;
    std::atomic<int64_t> at{0};  // 0 = not set
    Socket fd;
  };
  struct Note final : PollHandler {
    void on_event(uint32_t) override { set.store(true, std::memory_order_relaxed); }
    std::atomic<bool> set{false};
  };

  std::atomic<uint32_t> own_flag_{0};
  std::atomic<uint32_t>* sleeping_ = &own_flag_;
  Note events_;
  Timer timer_;
  Poller poller_{"waker"};
  Socket event_;
};

}  // namespace perseus

// A world of ranks as threads over the C ABI, for tests: every rank runs the same function on a context of its own.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "perseus/perseus.h"

namespace perseus_test {

// How the ranks of a test world reach each other.
struct Medium {
  const char* name;       // "mem", "shm", "tcp"
  const char* transport;  // value of PERSEUS_TRANSPORT
};
inline std::vector<Medium> all_media() { return {{"mem", "auto"}, {"shm", "shm"}, {"tcp", "tcp"}}; }

// ThreadSanitizer makes the tests 15 times slower, AddressSanitizer 4 times.
#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif
#ifdef __SANITIZE_ADDRESS__
constexpr bool kSanitizer = true;
#else
constexpr bool kSanitizer = kThreadSanitizer;
#endif

// How much of a grid of dtypes, sizes and shapes is run. make test: a part that covers all pairs, thinned out under
// sanitizers; make test-all: the whole grid, under sanitizers the part that covers all pairs.
inline bool test_all() { return std::getenv("PERSEUS_TEST_FULL") != nullptr; }
inline bool full_grid() { return test_all() && !kSanitizer; }
inline bool thin_grid() { return !test_all() && kSanitizer; }
// Of a test with parameters, thinned out: all but one world in three. `turn` counts the worlds.
inline bool left_out(size_t turn) {
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
  for (size_t i = 0; i < name.find('/'); ++i) turn += static_cast<unsigned char>(name[i]);
  return thin_grid() && turn % 3 != 0;
}
// For suites whose parameter is a medium's place in all_media(): without one of them, thinned out. ThreadSanitizer sees
// no races in shared memory, which a process has at two addresses; to AddressSanitizer a queue in its own is the
// simplest.
inline auto each_medium() {
  return testing::ValuesIn(!thin_grid()       ? std::vector<int>{0, 1, 2}
                           : kThreadSanitizer ? std::vector<int>{0, 2}
                                              : std::vector<int>{1, 2});
}
inline std::string medium_name(const testing::TestParamInfo<int>& info) {
  return all_media()[static_cast<size_t>(info.param)].name;
}
// Of a grid of dtypes and reductions, thinned out under ThreadSanitizer: threads meet in the same places for each.
inline bool left_out(perseus_dtype dtype, perseus_reduce_op op) {
  return kThreadSanitizer && thin_grid() && (dtype != PERSEUS_FLOAT32 || (op != PERSEUS_SUM && op != PERSEUS_MAX));
}
constexpr const char* kLeftOut = "PERSEUS_TEST_FULL=1 runs this in every world";

std::string unique_name();

struct WorldOptions {
  std::vector<std::string> overrides;
  // Called instead of failing the test when a context cannot be created.
  std::function<void(int rank, perseus_code code, const std::string& message)> on_create_error;
};

// One rank's context of a world that its ranks, as threads, know by `name`.
perseus_code create_context(const Medium& medium, const std::string& name, int rank, int size, uint32_t epoch,
                            std::vector<std::string> settings, perseus_context** context);

// Runs body(rank, context) on `size` threads; returns when all are done.
void run_world(const Medium& medium, int size, const std::function<void(int, perseus_context*)>& body,
               const WorldOptions& options = {});

struct Outcome {
  perseus_code code = PERSEUS_OK;
  std::string message;
};

perseus_request request_of(perseus_kind kind, const char* name, const perseus_tensor* tensors, int count);

Outcome submit(perseus_context* context, const perseus_request& request, perseus_handle* handle);

// Waits (a test must not hang, but a busy machine is no error) without releasing the handle.
Outcome wait(perseus_context* context, perseus_handle handle, int timeout_ms = 300'000);

Outcome run(perseus_context* context, const perseus_request& request);

// Waits for it without making any progress; false when it does not come true in time.
bool comes_true(const std::function<bool()>& fact, int seconds = 300);

// What the context counts; any thread may ask.
perseus_stats stats_of(perseus_context* context);

// All ranks wait for each other, without Perseus.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int turn = turn_;
    if (++here_ == size_) {
      here_ = 0;
      ++turn_;
      all_here_.notify_all();
    }
    all_here_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  const int size_;
  int here_ = 0, turn_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

// What this rank has sent so far, read while all ranks wait.
uint64_t messages_at_rest(perseus_context* context, Barrier* barrier);

}  // namespace perseus_test

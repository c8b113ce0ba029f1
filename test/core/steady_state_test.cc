// A step that has been done before allocates nothing, on no thread, and what comes once leaves nothing behind. Counts
// every operator new of the process.
#include <execinfo.h>

#include <cstdlib>
#include <new>

#include "operation.h"

namespace {

std::atomic<bool> recording{false};
std::atomic<int64_t> allocations{0};  // while recording
std::atomic<int64_t> alive{0};        // always

constexpr int kMostStacks = 4, kMostFrames = 24;
void* stacks[kMostStacks][kMostFrames];
int depths[kMostStacks];

void* counted(size_t size, size_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<size_t>(size, 1)) != 0) std::abort();
  alive.fetch_add(1, std::memory_order_relaxed);
  if (recording.load(std::memory_order_relaxed)) {
    const int64_t n = allocations.fetch_add(1, std::memory_order_relaxed);
    if (n < kMostStacks) depths[n] = backtrace(stacks[n], kMostFrames);
  }
  return memory;
}
void released(void* memory) {
  if (memory == nullptr) return;
  alive.fetch_sub(1, std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new[](size_t size) { return counted(size, alignof(std::max_align_t)); }
void* operator new(size_t size, std::align_val_t alignment) { return counted(size, static_cast<size_t>(alignment)); }
void* operator new[](size_t size, std::align_val_t alignment) { return counted(size, static_cast<size_t>(alignment)); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return counted(size, alignof(std::max_align_t)); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return counted(size, alignof(std::max_align_t)); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { released(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { released(memory); }
void operator delete(void* memory) noexcept { released(memory); }
void operator delete[](void* memory) noexcept { released(memory); }
void operator delete(void* memory, size_t) noexcept { released(memory); }
void operator delete[](void* memory, size_t) noexcept { released(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { released(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { released(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { released(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { released(memory); }

namespace {

using namespace perseus_test;

constexpr size_t kTensors = 16;
// ThreadSanitizer looks at every element, and at nothing new in more of them.
constexpr int64_t kMost = kThreadSanitizer ? 50000 : 500000, kMany = kThreadSanitizer ? 20000 : 200000;
constexpr int64_t kCounts[kTensors] = {1, 5,  64,  1000, 1001,  30000, 70000, kMany,
                                       3, 17, 128, 4096, 12345, 99999, 2,     kMost};

// A gradient step as an adapter does it: submits 16 named tensors and waits for them, in C only.
class Step {
 public:
  explicit Step(perseus_codec codec) : codec_(codec) {
    for (size_t i = 0; i < kTensors; ++i) {
      data_[i].assign(static_cast<size_t>(kCounts[i]), 0.0f);
      tensors_[i] = {data_[i].data(), data_[i].data(), &kCounts[i], 1, PERSEUS_FLOAT32};
      names_[i] = "layer." + std::to_string(i) + ".weight/with/a/name/longer/than/a/short/string";
    }
  }
  bool run(perseus_context* context, int rank) {
    perseus_handle handles[kTensors];
    for (size_t i = 0; i < kTensors; ++i) {
      std::fill(data_[i].begin(), data_[i].end(), static_cast<float>(rank + 1));
      perseus_request request = request_of(PERSEUS_ALLREDUCE, names_[i].c_str(), &tensors_[i], 1);
      request.op = PERSEUS_AVERAGE;
      request.gradient_of = 1;
      request.codec = codec_;
      if (perseus_request_submit(context, &request, &handles[i]) != PERSEUS_OK) return false;
    }
    bool good = true;
    for (size_t i = 0; i < kTensors; ++i) {
      good = perseus_handle_wait(context, handles[i], 300'000) == PERSEUS_OK && good;
      good = perseus_handle_release(context, handles[i]) == PERSEUS_OK && good;
      good = good && data_[i].front() == 1.5f && data_[i].back() == 1.5f;
    }
    return good;
  }

 private:
  const perseus_codec codec_;
  std::vector<float> data_[kTensors];
  perseus_tensor tensors_[kTensors];
  std::string names_[kTensors];
};

struct MediumCase {
  const char* name;
  size_t medium;
  std::vector<std::string> settings;
};
const MediumCase kCases[] = {{"mem", 0, {}},
                             {"shm", 1, {}},
                             {"tcp", 2, {}},
                             {"encoded", 0, {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1", "PERSEUS_CODEC_THREADS=3"}},
                             {"halving_doubling", 0, {"PERSEUS_ALLREDUCE_ALGORITHM=halving_doubling"}},
                             {"ring", 2, {"PERSEUS_ALLREDUCE_ALGORITHM=ring"}}};

class SteadyState : public testing::TestWithParam<int> {
 protected:
  static bool encoded() { return GetParam() == 3; }
  static Medium medium() { return all_media()[kCases[GetParam()].medium]; }
  static perseus_codec codec() { return encoded() ? PERSEUS_CODEC_FLOAT16 : PERSEUS_CODEC_EXACT; }
  static WorldOptions options() {
    WorldOptions options;
    options.overrides = kCases[GetParam()].settings;
    return options;
  }
};

TEST_P(SteadyState, StepsAllocateNothing) {
  // Which tensors share a round and a bucket is chance, so buffers may still grow after a warm-up, by ever less. What
  // every step allocates, or every tenth, shows in all windows.
  constexpr int kWindows = 8;
  const int steps = thin_grid() ? 20 : 50;
  int64_t fewest = INT64_MAX;
  std::atomic<int> arrived{0};
  const auto meet = [&](int phase) {
    ++arrived;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(300);
    while (arrived < 2 * phase && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  };
  run_world(
      medium(), 2,
      [&](int rank, perseus_context* context) {
        Step step(codec());
        for (int i = 0; i < steps; ++i) ASSERT_TRUE(step.run(context, rank)) << perseus_error_message();
        for (int window = 0; window < kWindows; ++window) {
          meet(4 * window + 1);
          if (rank == 0) {
            allocations = 0;
            recording = true;
          }
          meet(4 * window + 2);
          bool good = true;
          for (int i = 0; i < steps; ++i) good = step.run(context, rank) && good;
          meet(4 * window + 3);
          if (rank == 0) {
            recording = false;
            fewest = std::min(fewest, allocations.load());
          }
          meet(4 * window + 4);
          ASSERT_TRUE(good) << perseus_error_message();
          if (fewest == 0) break;
        }
      },
      options());
  EXPECT_EQ(fewest, 0) << "allocations in " << steps << " steps";
  for (int i = 0; fewest > 0 && i < kMostStacks; ++i) backtrace_symbols_fd(stacks[i], depths[i], 2);
}

TEST_P(SteadyState, NamesThatComeOnceLeaveNothingBehind) {
  if (!kCases[GetParam()].settings.empty()) GTEST_SKIP() << "names know nothing of settings";
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    const auto use_names = [&](int from, int to) {
      for (int i = from; i < to; ++i) {
        float value = 1;
        const int64_t shape = 1;
        const perseus_tensor tensor{&value, &value, &shape, 1, PERSEUS_FLOAT32};
        const std::string name = "allreduce.noname." + std::to_string(i);
        perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
        request.transient = 1;
        const Outcome outcome = run(context, request);
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        ASSERT_EQ(value, 2.0f);
      }
    };
    use_names(0, 500);
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0)).code, PERSEUS_OK);
    const int64_t before = alive;
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0)).code, PERSEUS_OK);
    use_names(500, 2500);
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0)).code, PERSEUS_OK);
    // A name takes two or more allocations; both ranks together have used 4000.
    EXPECT_LT(alive - before, 200) << "names are remembered";
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0)).code, PERSEUS_OK);
  });
}

TEST_P(SteadyState, AWorldThatHasEndedLeavesNothingBehind) {
  const auto live_and_end = [&] {
    run_world(
        medium(), 2,
        [&](int rank, perseus_context* context) {
          Step step(codec());
          EXPECT_TRUE(step.run(context, rank)) << perseus_error_message();
        },
        options());
  };
  for (int i = 0; i < 3; ++i) live_and_end();
  const int64_t before = alive;
  for (int i = 0; i < 20; ++i) live_and_end();
  EXPECT_LT(alive - before, 40) << "every world leaves something behind";
}

INSTANTIATE_TEST_SUITE_P(Media, SteadyState, testing::Range(0, static_cast<int>(std::size(kCases))),
                         [](const auto& info) { return kCases[info.param].name; });

}  // namespace

// Memory runs out at one place after the other. Wherever it does, a request that is refused can be submitted again,
// every handle ends, what has ended well is right, and a world that cannot go on says why.
#include <execinfo.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "observe/recording.h"
#include "operation.h"

namespace {

std::atomic<bool> armed{false};
std::atomic<int64_t> left{0};     // allocations of the library until one fails
std::atomic<int64_t> failing{0};  // so many after each other
thread_local bool is_test = false;
// Where the last of them failed, to be shown.
constexpr int kMostFrames = 32;
void* frames[kMostFrames];
int depth = 0;

void* allocate(size_t size, size_t alignment) {
  if (!is_test && armed.load(std::memory_order_relaxed)) {
    const int64_t number = left.fetch_sub(1);
    if (number <= 0 && number > -failing) {
      depth = backtrace(frames, kMostFrames);
      throw std::bad_alloc();
    }
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<size_t>(size, 1)) != 0)
    throw std::bad_alloc();
  return memory;
}

void* allocate_or_null(size_t size) noexcept {
  try {
    return allocate(size, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

[[gnu::noinline]] void* operator new(size_t size) { return allocate(size, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new[](size_t size) { return allocate(size, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<size_t>(alignment));
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
[[gnu::noinline]] void* operator new[](size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

using namespace perseus_test;

// Calls of the library: allocations of this thread count as its own.
class InLibrary {
 public:
  InLibrary() { is_test = false; }
  ~InLibrary() { is_test = true; }
};

constexpr int kRanks = 2, kSteps = 3;
constexpr int64_t kCounts[] = {3, 1000, 70000};
constexpr size_t kTensors = std::size(kCounts);

// Gradients, an allgather and a broadcast, whose values follow from rank, tensor and step.
class Step {
 public:
  Step(int rank, perseus_codec codec) : rank_(rank), codec_(codec) {
    for (size_t i = 0; i < kTensors; ++i) data_[i].resize(static_cast<size_t>(kCounts[i]));
  }

  // With `all`, not gradients only, the last of which is summed. False once the world has ended.
  bool run(perseus_context* context, int number, bool all) {
    sums_ = all;
    const size_t calls = kTensors + (all ? 2 : 0);
    perseus_handle handles[kTensors + 2] = {};
    bool goes_on = true;
    for (size_t i = 0; i < calls && goes_on; ++i) goes_on = submit(context, i, number, &handles[i]);
    for (size_t i = 0; i < calls && handles[i] != 0; ++i) goes_on = finish(context, i, number, handles[i]) && goes_on;
    return goes_on;
  }

 private:
  // Multiples of 2, whose halves float16 has, too.
  static float value(int rank, size_t tensor, int number) {
    return static_cast<float>(2 * (10 * rank + static_cast<int>(tensor) + 100 * number));
  }

  perseus_request request(size_t i, int number) {
    static const char* const names[] = {"a/gradient/with/a/long/name", "b", "c", "gathered", "spread"};
    if (i < kTensors) {
      std::fill(data_[i].begin(), data_[i].end(), value(rank_, i, number));
      tensor_ = {data_[i].data(), data_[i].data(), &kCounts[i], 1, PERSEUS_FLOAT32};
    } else {
      rows_ = rank_ + 1;
      std::fill_n(extra_[i - kTensors], 2, value(rank_, i, number));
      tensor_ = {extra_[i - kTensors], i == kTensors ? nullptr : extra_[i - kTensors], i == kTensors ? &rows_ : &two_,
                 1, PERSEUS_FLOAT32};
    }
    const perseus_kind kinds[] = {PERSEUS_ALLGATHER, PERSEUS_BROADCAST};
    perseus_request request = request_of(i < kTensors ? PERSEUS_ALLREDUCE : kinds[i - kTensors], names[i], &tensor_, 1);
    request.root = 1;
    if (i < kTensors) {
      request.op = sums(i) ? PERSEUS_SUM : PERSEUS_AVERAGE;
      request.gradient_of = 1;
      request.codec = codec_;
    }
    return request;
  }

  bool sums(size_t i) const { return sums_ && i == kTensors - 1; }

  bool submit(perseus_context* context, size_t i, int number, perseus_handle* handle) {
    const perseus_request wanted = request(i, number);
    for (int attempt = 0; attempt < 100; ++attempt) {
      perseus_code code;
      {
        const InLibrary in_library;
        code = perseus_request_submit(context, &wanted, handle);
      }
      if (code == PERSEUS_OK) return true;
      if (code != PERSEUS_INTERNAL) {
        EXPECT_EQ(code, PERSEUS_ABORTED) << perseus_error_message();
        return false;
      }
    }
    ADD_FAILURE() << "memory is out for ever";
    return false;
  }

  bool finish(perseus_context* context, size_t i, int number, perseus_handle handle) {
    perseus_code code;
    for (int attempt = 0; attempt < 100; ++attempt) {
      const InLibrary in_library;
      code = perseus_handle_wait(context, handle, 60'000);
      if (code != PERSEUS_INTERNAL || std::strstr(perseus_error_message(), "[api]") == nullptr) break;
    }
    EXPECT_NE(code, PERSEUS_IN_PROGRESS) << "request " << i << " of rank " << rank_ << " in step " << number;
    if (code == PERSEUS_IN_PROGRESS) {
      backtrace_symbols_fd(frames, depth, STDERR_FILENO);
      std::abort();  // what it reads and writes is about to go
    }
    if (code == PERSEUS_OK) check(context, i, number, handle);
    EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
    return code == PERSEUS_OK;
  }

  void check(perseus_context* context, size_t i, int number, perseus_handle handle) {
    if (i < kTensors) {
      const float expected = (value(0, i, number) + value(1, i, number)) / (sums(i) ? 1 : 2);
      const float most = codec_ == PERSEUS_CODEC_AUTO || codec_ == PERSEUS_CODEC_INT8 ? expected / 100 : 0;
      EXPECT_NEAR(data_[i].front(), expected, most) << i << " of step " << number;
      EXPECT_NEAR(data_[i].back(), expected, most) << i << " of step " << number;
    } else if (i == kTensors) {
      perseus_output output{};
      output.struct_size = sizeof output;
      ASSERT_EQ(perseus_handle_output(context, handle, 0, &output), PERSEUS_OK);
      const auto* gathered = static_cast<const float*>(output.data);
      for (int row = 0; row < 3; ++row) EXPECT_EQ(gathered[row], value(row == 0 ? 0 : 1, i, number));
    } else {
      EXPECT_EQ(extra_[1][1], value(1, i, number));
    }
  }

  const int rank_;
  const perseus_codec codec_;
  std::vector<float> data_[kTensors];
  bool sums_ = false;
  float extra_[2][2];
  int64_t rows_ = 0;
  const int64_t two_ = 2;
  perseus_tensor tensor_;
};

struct WorldCase {
  const char* name;
  size_t medium;
  perseus_codec codec;
  std::vector<std::string> settings;
};
const WorldCase kCases[] = {
    {"mem", 0, PERSEUS_CODEC_EXACT, {}},
    {"shm", 1, PERSEUS_CODEC_EXACT, {}},
    {"tcp", 2, PERSEUS_CODEC_EXACT, {}},
    {"encoded", 0, PERSEUS_CODEC_FLOAT16, {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1"}},
    {"automatic", 0, PERSEUS_CODEC_AUTO, {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1"}},
    {"held_back", 0, PERSEUS_CODEC_INT8, {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1"}},
    {"scheduled", 0, PERSEUS_CODEC_EXACT, {"PERSEUS_OFFLINE_NEG=1"}},
};

class AllocationFailures : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  const WorldCase& world() const { return kCases[std::get<0>(GetParam())]; }
  bool scheduled() const { return std::string(world().name) == "scheduled"; }

  // Memory runs out at the library's `number`th allocation after `before` steps; false if it did not get there.
  bool run_out(int64_t number, int before) {
    WorldOptions options;
    options.overrides = world().settings;
    options.overrides.push_back("PERSEUS_LOG_LEVEL=fatal");
    Barrier barrier(kRanks);
    failing = std::get<1>(GetParam());
    run_world(
        all_media()[world().medium], kRanks,
        [&](int rank, perseus_context* context) {
          is_test = true;
          Step step(rank, world().codec);
          // The second of the steps breaks a schedule.
          const auto run = [&](int number) { return step.run(context, number, !scheduled() || number == before + 1); };
          bool goes_on = true;
          for (int i = 0; i < before; ++i) goes_on = run(i) && goes_on;
          EXPECT_TRUE(goes_on) << perseus_error_message();
          barrier.wait();
          if (rank == 0) {
            left = number;
            armed = true;
          }
          barrier.wait();
          for (int i = before; i < before + kSteps && goes_on; ++i) goes_on = run(i);
          barrier.wait();
          armed = false;
          if (!goes_on) {
            EXPECT_NE(perseus_context_failed(context, nullptr), PERSEUS_OK);
          }
        },
        options);
    return left < 0;
  }

  void run_out_everywhere(int before) {
    is_test = true;
    // Measuring takes time, and sanitizers do.
    const int64_t stride = test_all() ? 1 : (world().codec == PERSEUS_CODEC_AUTO ? 11 : 1) * (kSanitizer ? 5 : 1);
    int64_t number = 0;
    while (run_out(number, before) && !HasFailure()) number += stride;
    std::printf("%lld allocations\n", static_cast<long long>(number));
    EXPECT_FALSE(HasFailure()) << "at allocation " << number;
  }
};

TEST_P(AllocationFailures, InTheFirstSteps) { run_out_everywhere(0); }

TEST_P(AllocationFailures, InLaterSteps) { run_out_everywhere(scheduled() ? 12 : 2); }

// The thread that writes it belongs to nobody who could be told.
TEST(AllocationFailuresOfTheTimeline, EndTheRecordingAlone) {
  is_test = true;
  for (const int in_a_row : {1, 20}) {
    failing = in_a_row;
    int64_t number = 0;
    for (left = -1; left < 0; ++number) {
      armed = false;
      perseus::Recording recording("/dev/null", {}, perseus::Log(perseus::LogLevel::kFatal, false, 0));
      left = number;
      armed = true;
      for (int i = 0; i < 10; ++i) {
        const std::string name = std::to_string(i) + std::string(100, 'x');
        perseus::TraceRecord record;
        record.at[0] = record.at[1] = record.at[2] = 1;
        record.transient = i % 2 == 0;
        EXPECT_TRUE(recording.has_room(perseus::Recording::slots_for(name.size()), 1));
        recording.add(record, name);
      }
    }
    armed = false;
    EXPECT_GT(number, 20);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, AllocationFailures,
                         testing::Combine(testing::Range(0, static_cast<int>(std::size(kCases))),
                                          testing::Values(1, 20)),
                         [](const auto& info) {
                           return std::string(kCases[std::get<0>(info.param)].name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace

// What callers of the C ABI may get wrong or have compiled long ago: sizes of structs, and handles that are not theirs.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <vector>

#include "operation.h"

namespace {

using namespace perseus_test;

// A struct of a caller that was compiled with fewer or more fields, between bytes that are not its own.
template <typename Struct>
class Callers {
 public:
  explicit Callers(size_t size) : bytes_(size, 0), size_(size) {
    bytes_.resize(size + sizeof(Struct) + 64, kForeign);
    std::memcpy(bytes_.data(), &size, sizeof size);
  }
  // Fields of `from` as far as this caller has them.
  Callers(size_t size, const Struct& from) : Callers(size) {
    std::memcpy(bytes_.data() + sizeof(size_t), reinterpret_cast<const char*>(&from) + sizeof(size_t),
                std::min(size, sizeof from) - sizeof(size_t));
  }
  Struct* get() { return reinterpret_cast<Struct*>(bytes_.data()); }
  void set_byte_behind(unsigned char value) { bytes_[sizeof(Struct)] = value; }
  // Nothing behind the struct has changed, nor its size, nor what only a newer caller has.
  void expect_untouched() const {
    size_t size = 0;
    std::memcpy(&size, bytes_.data(), sizeof size);
    EXPECT_EQ(size, size_);
    for (size_t i = sizeof(Struct); i < size_; ++i) EXPECT_EQ(bytes_[i], 0) << "field of a newer caller, byte " << i;
    for (size_t i = size_; i < bytes_.size(); ++i) ASSERT_EQ(bytes_[i], kForeign) << "byte " << i << " of " << size_;
  }

 private:
  static constexpr unsigned char kForeign = 0xa5;
  alignas(8) std::vector<unsigned char> bytes_;
  const size_t size_;
};

// Sizes that a call must serve, and such that no version of the struct has.
template <typename Struct>
void expect_sizes(const char* name, const std::function<perseus_code(Struct*)>& call) {
  for (const size_t size : {2 * sizeof(size_t), sizeof(Struct) - sizeof(size_t), sizeof(Struct), sizeof(Struct) + 8}) {
    Callers<Struct> caller(size);
    EXPECT_EQ(call(caller.get()), PERSEUS_OK) << name << " of " << size << " bytes: " << perseus_error_message();
    caller.expect_untouched();
  }
  for (const size_t size : {size_t{0}, sizeof(size_t), size_t{1} << 40}) {
    Struct wrong = {};
    wrong.struct_size = size;
    EXPECT_EQ(call(&wrong), PERSEUS_INVALID_ARGUMENT) << name << " of " << size << " bytes";
    EXPECT_EQ(perseus_error_message(), "[api] " + std::string(name) + ".struct_size is " + std::to_string(size) +
                                           ": zero-initialise the struct and set it to sizeof(" + name + ")");
  }
}

TEST(StructSizes, ResultsFillNoMoreThanTheCallersStruct) {
  expect_sizes<perseus_config_variable>("perseus_config_variable",
                                        [](auto* variable) { return perseus_config_describe(0, variable); });
  run_world(all_media()[0], 1, [](int, perseus_context* context) {
    expect_sizes<perseus_stats>("perseus_stats", [=](auto* stats) { return perseus_context_stats(context, stats); });
    expect_sizes<perseus_speeds>("perseus_speeds",
                                 [=](auto* speeds) { return perseus_group_speeds(context, 0, speeds); });
    perseus_request join = request_of(PERSEUS_JOIN, "join", nullptr, 0);
    perseus_handle handle = 0;
    ASSERT_EQ(submit(context, join, &handle).code, PERSEUS_OK);
    ASSERT_EQ(wait(context, handle).code, PERSEUS_OK);
    expect_sizes<perseus_output>("perseus_output",
                                 [=](auto* output) { return perseus_handle_output(context, handle, 0, output); });
  });
}

TEST(StructSizes, AnOlderCallersFieldsAreFilledInAndANewersAreLeft) {
  run_world(all_media()[0], 1, [](int, perseus_context* context) {
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "one operation", nullptr, 0)).code, PERSEUS_OK);
    Callers<perseus_stats> older(offsetof(perseus_stats, sleeps)), newer(sizeof(perseus_stats) + 16);
    ASSERT_EQ(perseus_context_stats(context, older.get()), PERSEUS_OK);
    ASSERT_EQ(perseus_context_stats(context, newer.get()), PERSEUS_OK);
    EXPECT_EQ(older.get()->operations, 1u);
    EXPECT_EQ(newer.get()->operations, 1u);
    older.expect_untouched();
    newer.expect_untouched();
  });
}

TEST(StructSizes, AnIdentityFillsNoMoreThanItsCallersStruct) {
  const char* const environment[] = {"RANK=3", "WORLD_SIZE=5", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", nullptr};
  expect_sizes<perseus_launched_identity>(
      "perseus_launched_identity", [&](auto* found) { return perseus_launched_identity_read(environment, found); });
  using Identity = perseus_launched_identity;
  for (const size_t size : {offsetof(Identity, cross_rank), sizeof(Identity), sizeof(Identity) + 16}) {
    Callers<Identity> caller(size);
    ASSERT_EQ(perseus_launched_identity_read(environment, caller.get()), PERSEUS_OK) << perseus_error_message();
    caller.expect_untouched();
    const Identity& found = *caller.get();
    EXPECT_EQ(std::make_tuple(found.rank, found.size, found.local_rank, found.local_size), std::make_tuple(3, 5, 1, 2));
    if (size < sizeof(Identity)) continue;
    EXPECT_EQ(std::make_tuple(found.cross_rank, found.cross_size), std::make_tuple(0, 0));
    EXPECT_STREQ(found.launcher, "torch");
  }
}

TEST(LaunchedIdentity, IsReadFromTheTextsThatAreGivenAndFromNowhereElse) {
  const auto read = [](const std::vector<const char*>& texts, perseus_launched_identity* found) {
    *found = {};
    found->struct_size = sizeof *found;
    return perseus_launched_identity_read(texts.data(), found);
  };
  perseus_launched_identity found;
  // As in an environment, the first of two texts counts, and a text without a value is nothing.
  ASSERT_EQ(
      read({"PERSEUS_SIZE", "PERSEUS_SIZE=4", "PERSEUS_SIZES=7", "PERSEUS_RANK=2", "PERSEUS_RANK=1", nullptr}, &found),
      PERSEUS_OK)
      << perseus_error_message();
  EXPECT_EQ(std::make_tuple(found.rank, found.size), std::make_tuple(2, 4));
  EXPECT_STREQ(found.launcher, "perseusrun");
  ASSERT_EQ(read({nullptr}, &found), PERSEUS_OK);
  EXPECT_EQ(std::make_tuple(found.rank, found.size, found.local_size, found.cross_size), std::make_tuple(0, 1, 1, 1));
  EXPECT_STREQ(found.launcher, "single");
  EXPECT_EQ(read({"PERSEUS_SIZE=4", "PERSEUS_RANK=4", nullptr}, &found), PERSEUS_INVALID_ARGUMENT);
  EXPECT_STREQ(perseus_error_message(), "[identity] PERSEUS_RANK='4': expected 0..3 (PERSEUS_SIZE=4)");
}

TEST(LaunchedIdentity, IsThatOfThisProcessWhenNoTextsAreGiven) {
  perseus_launched_identity found = {};
  found.struct_size = sizeof found;
  ASSERT_EQ(setenv("PERSEUS_RANK", "1", 1), 0);
  ASSERT_EQ(setenv("PERSEUS_SIZE", "3", 1), 0);
  const perseus_code code = perseus_launched_identity_read(nullptr, &found);
  unsetenv("PERSEUS_RANK");
  unsetenv("PERSEUS_SIZE");
  ASSERT_EQ(code, PERSEUS_OK) << perseus_error_message();
  EXPECT_EQ(std::make_tuple(found.rank, found.size), std::make_tuple(1, 3));
}

TEST(StructSizes, ARequestIsReadAsFarAsItsCallerWroteIt) {
  run_world(all_media()[0], 1, [](int, perseus_context* context) {
    float data[] = {1.5f, -2.25f};
    const int64_t shape[] = {2};
    const perseus_tensor tensor{data, data, shape, 1, PERSEUS_FLOAT32};
    perseus_request whole = request_of(PERSEUS_ALLREDUCE, "t", &tensor, 1);
    for (const size_t size : {offsetof(perseus_request, gradient_of), sizeof whole, sizeof whole + 24}) {
      Callers<perseus_request> caller(size, whole);
      EXPECT_EQ(run(context, *caller.get()).code, PERSEUS_OK) << size << " bytes: " << perseus_error_message();
    }
    Callers<perseus_request> newer(sizeof whole + 24, whole);
    newer.set_byte_behind(1);
    perseus_handle handle = 0;
    const Outcome outcome = submit(context, *newer.get(), &handle);
    EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
    EXPECT_EQ(outcome.message, std::string("[api] the caller sets a field of perseus_request that this library does "
                                           "not have: it was compiled for a newer Perseus than the installed ") +
                                   perseus_version());
    whole.struct_size = 0;
    EXPECT_EQ(submit(context, whole, &handle).code, PERSEUS_INVALID_ARGUMENT);
  });
}

TEST(StructSizes, ContextOptionsOfAnOlderCallerEndWhereItsStructDoes) {
  perseus_context_options whole = {};
  whole.size = 1;
  whole.memory_world = "not an address of a text";
  const auto create = [](perseus_context_options* options) {
    perseus_context* context = nullptr;
    const perseus_code code = perseus_context_create(options, &context);
    perseus_context_destroy(context);
    return code;
  };
  // Behind the older caller's struct are bytes that are no pointers.
  Callers<perseus_context_options> older(offsetof(perseus_context_options, overrides), whole);
  EXPECT_EQ(create(older.get()), PERSEUS_OK) << perseus_error_message();
  Callers<perseus_context_options> newer(sizeof whole + 8, whole);
  EXPECT_EQ(create(newer.get()), PERSEUS_OK) << perseus_error_message();
  newer.set_byte_behind(1);
  EXPECT_EQ(create(newer.get()), PERSEUS_INVALID_ARGUMENT);
  whole.struct_size = 0;
  EXPECT_EQ(create(&whole), PERSEUS_INVALID_ARGUMENT);
}

TEST(StructSizes, SpeedsAndResidualsAreReadByTheirSize) {
  perseus_speeds speeds = {};
  speeds.struct_size = sizeof speeds;
  speeds.groups = speeds.shards = 1;
  Callers<perseus_speeds> newer(sizeof speeds + 8, speeds);
  EXPECT_EQ(perseus_speeds_choose(newer.get(), 1024), perseus_speeds_choose(&speeds, 1024));
  EXPECT_EQ(perseus_speeds_estimate(newer.get(), PERSEUS_CODEC_INT8, 1024),
            perseus_speeds_estimate(&speeds, PERSEUS_CODEC_INT8, 1024));
  newer.set_byte_behind(1);
  EXPECT_EQ(perseus_speeds_choose(newer.get(), 1024), -1);
  EXPECT_EQ(perseus_speeds_estimate(newer.get(), PERSEUS_CODEC_INT8, 1024), -1);
  run_world(all_media()[0], 1, [](int, perseus_context* context) {
    perseus_residual residual = {};
    residual.name = "t";
    Callers<perseus_residual> older(offsetof(perseus_residual, layout), residual),
        larger(sizeof residual + 8, residual);
    EXPECT_EQ(perseus_residual_read(context, older.get()), PERSEUS_OK) << perseus_error_message();
    EXPECT_EQ(perseus_residual_read(context, larger.get()), PERSEUS_OK) << perseus_error_message();
    older.expect_untouched();
    larger.expect_untouched();
    float two[] = {1, 2};
    residual.data = two;
    residual.count = 2;
    Callers<perseus_residual> given(offsetof(perseus_residual, layout), residual);
    EXPECT_EQ(perseus_residual_write(context, given.get()), PERSEUS_OK) << perseus_error_message();
    residual.struct_size = 0;
    EXPECT_EQ(perseus_residual_write(context, &residual), PERSEUS_INVALID_ARGUMENT);
  });
}

// Handles without an operation behind them.
void expect_unknown(perseus_context* context, perseus_handle handle) {
  perseus_output output = {};
  output.struct_size = sizeof output;
  EXPECT_EQ(perseus_handle_poll(context, handle), -1) << handle;
  const Outcome outcome = wait(context, handle, 0);
  EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT) << handle;
  EXPECT_EQ(outcome.message, "[api] handle " + std::to_string(handle) + " was not created or has been cleared");
  EXPECT_EQ(perseus_handle_gradient(context, handle), -1) << handle;
  EXPECT_EQ(perseus_handle_output(context, handle, 0, &output), PERSEUS_INVALID_ARGUMENT) << handle;
  EXPECT_EQ(perseus_handle_take_output(context, handle, 0), nullptr) << handle;
  EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_INVALID_ARGUMENT) << handle;
}

// A rank that gets rows of a reduce-scatter needs memory for them, and one that gets none does not.
TEST(Tensors, ARequestWithoutMemoryForItsResultIsRefused) {
  run_world(all_media()[0], 2, [](int rank, perseus_context* context) {
    std::vector<float> in = {1.0F, 2.0F, 3.0F}, out(3);
    for (const int64_t rows : {1, 3}) {
      perseus_tensor tensor{in.data(), nullptr, &rows, 1, PERSEUS_FLOAT32};
      const bool gets_rows = rows == 3 || rank == 0;
      if (gets_rows) {
        const Outcome outcome = run(context, request_of(PERSEUS_REDUCESCATTER, "scattered", &tensor, 1));
        EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
        EXPECT_EQ(outcome.message, "[engine] 'scattered' has elements but no memory: its pointer is null");
        tensor.output = out.data();
      }
      EXPECT_EQ(run(context, request_of(PERSEUS_REDUCESCATTER, "scattered", &tensor, 1)).code, PERSEUS_OK);
      if (gets_rows) {
        EXPECT_EQ(out[0], rank == 0 ? 2.0F : 6.0F);
      }
    }
  });
}

TEST(Handles, ThatWereNeverIssuedAreUnknown) {
  run_world(all_media()[0], 1, [](int, perseus_context* context) {
    expect_unknown(context, 7);  // before the first one
    perseus_handle issued = 0;
    ASSERT_EQ(submit(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0), &issued).code, PERSEUS_OK);
    ASSERT_EQ(wait(context, issued).code, PERSEUS_OK);
    for (const perseus_handle never : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1} << 40, INT64_MAX,
                                       issued + 1, issued + (int64_t{1} << 22), issued - (int64_t{1} << 22)})
      expect_unknown(context, never);
    ASSERT_EQ(perseus_handle_release(context, issued), PERSEUS_OK);
    expect_unknown(context, issued);
    expect_unknown(context, issued + (int64_t{1} << 22));  // that of the next operation, which is not there yet
  });
}

TEST(Handles, OnlyOneOfManyThreadsReleasesAHandle) {
  constexpr int kThreads = 4, kRounds = 200;
  run_world(all_media()[0], 1, [&](int, perseus_context* context) {
    float data[64] = {};
    const int64_t shape[] = {64};
    const perseus_tensor tensor{data, nullptr, shape, 1, PERSEUS_FLOAT32};
    const perseus_request gather = request_of(PERSEUS_ALLGATHER, "g", &tensor, 1);
    Barrier barrier(kThreads);
    perseus_handle handle = 0;
    std::atomic<int> released{0}, taken{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&, thread] {
        for (int round = 0; round < kRounds; ++round) {
          if (thread == 0) {
            EXPECT_EQ(submit(context, gather, &handle).code, PERSEUS_OK);
          }
          barrier.wait();
          const perseus_handle mine = handle;
          // Done, or released by a faster thread: never a wait for what comes next in its place.
          const perseus_code code = perseus_handle_wait(context, mine, 60'000);
          EXPECT_TRUE(code == PERSEUS_OK || code == PERSEUS_INVALID_ARGUMENT) << code;
          if (void* memory = perseus_handle_take_output(context, mine, 0)) {
            ++taken;
            perseus_buffer_free(memory);
          }
          released += perseus_handle_release(context, mine) == PERSEUS_OK ? 1 : 0;
          barrier.wait();
        }
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(released, kRounds);
    EXPECT_LE(taken, kRounds);
    // Two handles of one slot would be the same number.
    perseus_handle first = 0, second = 0;
    ASSERT_EQ(submit(context, gather, &first).code, PERSEUS_OK);
    ASSERT_EQ(submit(context, request_of(PERSEUS_BARRIER, "b", nullptr, 0), &second).code, PERSEUS_OK);
    EXPECT_NE(first, second);
    for (const perseus_handle each : {first, second}) {
      EXPECT_EQ(wait(context, each).code, PERSEUS_OK);
      EXPECT_EQ(perseus_handle_release(context, each), PERSEUS_OK);
    }
  });
}

}  // namespace

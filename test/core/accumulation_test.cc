// Gradients that are summed over steps: nothing is sent before the last one, which reduces the sum; sums of different
// optimizers, groups and names do not mix.
#include <cstddef>
#include <cstring>

#include "base/half.h"
#include "operation.h"

namespace {

using namespace perseus_test;

perseus_request gradient_of(uint64_t owner, const char* name, const perseus_tensor* tensors, int count = 1) {
  perseus_request request = request_of(PERSEUS_ALLREDUCE, name, tensors, count);
  request.op = PERSEUS_AVERAGE;
  request.gradient_of = owner;
  return request;
}

struct Result {
  Outcome outcome;
  int gradient = -1;
};

Result run_gradient(perseus_context* context, const perseus_request& request) {
  Result result;
  perseus_handle handle = 0;
  result.outcome = submit(context, request, &handle);
  if (result.outcome.code != PERSEUS_OK) return result;
  result.outcome = wait(context, handle);
  result.gradient = perseus_handle_gradient(context, handle);
  perseus_handle_release(context, handle);
  return result;
}

// Small whole numbers, exact in every type, also as sums and means over 2 or 4 ranks.
float value(int rank, int step, size_t i) {
  return static_cast<float>((rank * 12 + step * 20 + static_cast<int>(i % 13) * 4) % 96);
}

Bytes gradient(perseus_dtype dtype, int rank, int step, size_t count) {
  Bytes bytes(count * size_of(dtype));
  for (size_t i = 0; i < count; ++i) {
    const float v = value(rank, step, i);
    const double wide = v;
    const uint16_t half = perseus::float_to_half(v), brain = perseus::float_to_bfloat16(v);
    const void* from = dtype == PERSEUS_FLOAT16    ? static_cast<const void*>(&half)
                       : dtype == PERSEUS_BFLOAT16 ? &brain
                       : dtype == PERSEUS_FLOAT64  ? static_cast<const void*>(&wide)
                                                   : &v;
    std::memcpy(bytes.data() + i * size_of(dtype), from, size_of(dtype));
  }
  return bytes;
}

double read(perseus_dtype dtype, const Bytes& bytes, size_t i) {
  const unsigned char* at = bytes.data() + i * size_of(dtype);
  uint16_t half;
  float single;
  double wide;
  std::memcpy(&half, at, sizeof half);
  if (dtype == PERSEUS_FLOAT16) return perseus::half_to_float(half);
  if (dtype == PERSEUS_BFLOAT16) return perseus::bfloat16_to_float(half);
  if (dtype == PERSEUS_FLOAT64) {
    std::memcpy(&wide, at, sizeof wide);
    return wide;
  }
  std::memcpy(&single, at, sizeof single);
  return single;
}

class Accumulation : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
  static WorldOptions steps(int n) {
    WorldOptions options;
    options.overrides = {"PERSEUS_ACCUMULATE_N_STEPS=" + std::to_string(n)};
    return options;
  }
};

TEST_P(Accumulation, TheLastStepGetsTheAverageOfTheSums) {
  constexpr int kSteps = 3;
  const std::vector<perseus_dtype> dtypes{PERSEUS_FLOAT32, PERSEUS_FLOAT16, PERSEUS_BFLOAT16, PERSEUS_FLOAT64};
  for (int size : {1, 2, 4}) {
    run_world(
        medium(), size,
        [&](int rank, perseus_context* context) {
          for (int step = 0; step < 3 * kSteps; ++step) {
            // One after the other and, last, all as one group; small and cut into chunks.
            for (size_t which = 0; which <= dtypes.size(); ++which) {
              const bool grouped = which == dtypes.size();
              const std::vector<perseus_dtype> members = grouped ? dtypes : std::vector<perseus_dtype>{dtypes[which]};
              const int64_t count = which == 0 ? 70001 : 37;
              std::vector<Bytes> inputs;
              std::vector<perseus_tensor> tensors;
              for (perseus_dtype dtype : members)
                inputs.push_back(gradient(dtype, rank, step, static_cast<size_t>(count)));
              std::vector<Bytes> outputs = inputs;
              for (size_t i = 0; i < members.size(); ++i)
                tensors.push_back({inputs[i].data(), outputs[i].data(), &count, 1, members[i]});
              const std::string name = "g" + std::to_string(which);
              const Result result =
                  run_gradient(context, gradient_of(7, name.c_str(), tensors.data(), static_cast<int>(tensors.size())));
              ASSERT_EQ(result.outcome.code, PERSEUS_OK) << result.outcome.message;
              const bool last = step % kSteps == kSteps - 1;
              ASSERT_EQ(result.gradient, last ? PERSEUS_GRADIENT_REDUCED : PERSEUS_GRADIENT_HELD) << step;
              for (size_t m = 0; m < members.size(); ++m) {
                for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
                  double expected = value(rank, step, i);
                  if (last) {
                    expected = 0;
                    for (int r = 0; r < size; ++r)
                      for (int s = step + 1 - kSteps; s <= step; ++s) expected += value(r, s, i);
                    expected /= size;
                  }
                  // bfloat16 has 8 bits.
                  const double tolerance = members[m] == PERSEUS_BFLOAT16 && last ? expected / 128 : 0;
                  ASSERT_NEAR(read(members[m], outputs[m], i), expected, tolerance) << name << " step " << step;
                }
                EXPECT_EQ(inputs[m], gradient(members[m], rank, step, static_cast<size_t>(count))) << "input changed";
              }
            }
          }
        },
        steps(kSteps));
  }
}

TEST_P(Accumulation, WhatIsHeldNeedsNoOtherRank) {
  run_world(
      medium(), 2,
      [&](int rank, perseus_context* context) {
        const int64_t count = 5;
        float data[5];
        const perseus_tensor tensor{data, data, &count, 1, PERSEUS_FLOAT32};
        const auto hold = [&](int step) {
          for (size_t i = 0; i < 5; ++i) data[i] = value(rank, step, i);
          EXPECT_EQ(run_gradient(context, gradient_of(1, "w", &tensor)).gradient, PERSEUS_GRADIENT_HELD);
        };
        // Either rank does all its steps while the other does nothing but wait for that.
        const auto barrier = [&](const char* name) {
          EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, name, nullptr, 0)).code, PERSEUS_OK);
        };
        if (rank == 0) hold(0), hold(1);
        barrier("one");
        if (rank == 1) hold(0), hold(1);
        barrier("two");
        perseus_stats before{}, after{};
        before.struct_size = after.struct_size = sizeof before;
        ASSERT_EQ(perseus_context_stats(context, &before), PERSEUS_OK);
        for (size_t i = 0; i < 5; ++i) data[i] = value(rank, 2, i);
        EXPECT_EQ(run_gradient(context, gradient_of(1, "w", &tensor)).gradient, PERSEUS_GRADIENT_REDUCED);
        for (size_t i = 0; i < 5; ++i) {
          float expected = 0;
          for (int r = 0; r < 2; ++r)
            for (int s = 0; s < 3; ++s) expected += value(r, s, i);
          EXPECT_EQ(data[i], expected / 2);
        }
        ASSERT_EQ(perseus_context_stats(context, &after), PERSEUS_OK);
        EXPECT_EQ(after.operations - before.operations, 1u);
        EXPECT_GE(after.staging_bytes, 5 * sizeof(float)) << "the sum's memory is not counted";
      },
      steps(3));
}

TEST_P(Accumulation, OptimizersDoNotMixAndCanStartAnew) {
  run_world(
      medium(), 2,
      [&](int rank, perseus_context* context) {
        const int64_t count = 1;
        float data = 0;
        const perseus_tensor tensor{&data, &data, &count, 1, PERSEUS_FLOAT32};
        const auto step = [&](uint64_t owner, float mine) {
          data = mine + static_cast<float>(rank) * 2;
          return run_gradient(context, gradient_of(owner, "w", &tensor)).gradient;
        };
        EXPECT_EQ(step(1, 10), PERSEUS_GRADIENT_HELD);
        EXPECT_EQ(step(2, 100), PERSEUS_GRADIENT_HELD);
        EXPECT_EQ(step(1, 20), PERSEUS_GRADIENT_REDUCED);
        EXPECT_EQ(data, 32);  // 10 + 20 + twice the mean of 0 and 2
        perseus_gradients_forget(context, 2);
        EXPECT_EQ(step(2, 1000), PERSEUS_GRADIENT_HELD) << "forgotten, so the first again";
        EXPECT_EQ(step(2, 2000), PERSEUS_GRADIENT_REDUCED);
        EXPECT_EQ(data, 3002);
        perseus_gradients_forget(context, 3);  // never seen
      },
      steps(2));
}

TEST_P(Accumulation, SumsAloneCanStartAnew) {
  constexpr int64_t kCount = 5000;
  WorldOptions options = steps(2);
  options.overrides.insert(options.overrides.end(), {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1",
                                                     "LIGHT_TOPK_THRESHOLD=0", "LIGHT_TOPK_WARMUP_STEPS=0"});
  run_world(
      medium(), 2,
      [&](int rank, perseus_context* context) {
        std::vector<float> data(kCount);
        const perseus_tensor tensor{data.data(), data.data(), &kCount, 1, PERSEUS_FLOAT32};
        const auto step = [&](int number) {
          for (size_t i = 0; i < data.size(); ++i)
            data[i] = static_cast<float>((i * 7 + static_cast<size_t>(100 * number + rank)) % 1009);
          perseus_request request = gradient_of(1, "w", &tensor);
          request.codec = PERSEUS_CODEC_TOP_K;
          request.codec_argument = 0.01;
          return run_gradient(context, request).gradient;
        };
        const auto held = [&] {
          perseus_residual residual{};
          residual.struct_size = sizeof residual;
          residual.gradient_of = 1;
          residual.name = "w";
          EXPECT_EQ(perseus_residual_read(context, &residual), PERSEUS_OK);
          std::vector<float> found(residual.count);
          residual.data = found.empty() ? nullptr : found.data();
          EXPECT_EQ(perseus_residual_read(context, &residual), PERSEUS_OK);
          return found;
        };
        step(0);
        EXPECT_EQ(step(1), PERSEUS_GRADIENT_REDUCED);
        const std::vector<float> before = held();
        EXPECT_EQ(before.size(), static_cast<size_t>(2 * kCount));
        EXPECT_EQ(step(2), PERSEUS_GRADIENT_HELD);
        perseus_sums_forget(context, 1);
        EXPECT_EQ(held(), before);
        EXPECT_EQ(step(3), PERSEUS_GRADIENT_HELD) << "the first again";
        EXPECT_EQ(step(4), PERSEUS_GRADIENT_REDUCED);
        perseus_gradients_forget(context, 1);
        EXPECT_TRUE(held().empty());
        perseus_sums_forget(context, 3);  // never seen
      },
      options);
}

TEST_P(Accumulation, ASumKeepsItsShapeUntilItIsDone) {
  run_world(
      medium(), 2,
      [&](int, perseus_context* context) {
        float data[4] = {1, 2, 3, 4};
        const int64_t four = 4, three = 3;
        const perseus_tensor large{data, data, &four, 1, PERSEUS_FLOAT32};
        const perseus_tensor small{data, data, &three, 1, PERSEUS_FLOAT32};
        EXPECT_EQ(run_gradient(context, gradient_of(1, "w", &large)).gradient, PERSEUS_GRADIENT_HELD);
        const Result refused = run_gradient(context, gradient_of(1, "w", &small));
        EXPECT_EQ(refused.outcome.code, PERSEUS_INVALID_ARGUMENT);
        EXPECT_NE(refused.outcome.message.find("'w' has changed its size or dtype after 1 of 2 steps"),
                  std::string::npos)
            << refused.outcome.message;
        EXPECT_EQ(run_gradient(context, gradient_of(1, "w", &large)).gradient, PERSEUS_GRADIENT_REDUCED);
        EXPECT_EQ(data[3], 8);
        data[0] = 5;
        EXPECT_EQ(run_gradient(context, gradient_of(1, "w", &small)).gradient, PERSEUS_GRADIENT_HELD);
        EXPECT_EQ(run_gradient(context, gradient_of(1, "w", &small)).gradient, PERSEUS_GRADIENT_REDUCED);
        EXPECT_EQ(data[0], 10);
      },
      steps(2));
}

TEST_P(Accumulation, IsForGradientsOnly) {
  run_world(
      medium(), 2,
      [&](int, perseus_context* context) {
        const int64_t count = 1;
        float data = 1;
        int32_t whole = 1;
        const perseus_tensor tensor{&data, &data, &count, 1, PERSEUS_FLOAT32};
        const perseus_tensor integer{&whole, &whole, &count, 1, PERSEUS_INT32};
        EXPECT_EQ(run_gradient(context, gradient_of(0, "metric", &tensor)).gradient, PERSEUS_GRADIENT_REDUCED);
        // A caller that was compiled before there were gradients.
        perseus_request old = gradient_of(1, "old", &tensor);
        old.struct_size = offsetof(perseus_request, gradient_of);
        EXPECT_EQ(run_gradient(context, old).gradient, PERSEUS_GRADIENT_REDUCED);
        perseus_request broadcast = gradient_of(1, "b", &tensor);
        broadcast.kind = PERSEUS_BROADCAST;
        for (const perseus_request& request : {gradient_of(1, "i", &integer), broadcast}) {
          const Result refused = run_gradient(context, request);
          EXPECT_EQ(refused.outcome.code, PERSEUS_INVALID_ARGUMENT);
          EXPECT_NE(refused.outcome.message.find("expected an allreduce or allgather of float16"), std::string::npos);
        }
        perseus_request gathered = gradient_of(1, "g", &tensor);
        gathered.kind = PERSEUS_ALLGATHER;
        const Result refused = run_gradient(context, gathered);
        EXPECT_EQ(refused.outcome.code, PERSEUS_INVALID_ARGUMENT);
        EXPECT_NE(refused.outcome.message.find("'g' is a gradient that is gathered"), std::string::npos);
        EXPECT_EQ(perseus_handle_gradient(context, 12345), -1);
        EXPECT_EQ(perseus_context_setting(context, "PERSEUS_ACCUMULATE_N_STEPS"), 4);
        EXPECT_EQ(perseus_context_setting(context, "PERSEUS_ALLREDUCE_NANCHECK_ACTION"), 0);
        EXPECT_EQ(perseus_context_setting(context, "NO_SUCH_VARIABLE"), -1);
        // Whoever leaves ends the world for the other.
        EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0)).code, PERSEUS_OK);
      },
      steps(4));
}

TEST_P(Accumulation, ARankThatHasJoinedGivesZeros) {
  run_world(
      medium(), 2,
      [&](int rank, perseus_context* context) {
        const int64_t count = 2;
        float data[2];
        const perseus_tensor tensor{data, data, &count, 1, PERSEUS_FLOAT32};
        // Rank 1 has data for one sum and a half; the half is lost.
        for (int step = 0; step < (rank == 1 ? 3 : 4); ++step) {
          data[0] = data[1] = static_cast<float>(1 + rank + 10 * step);
          perseus_request request = gradient_of(1, "w", &tensor);
          request.op = PERSEUS_SUM;
          const Result result = run_gradient(context, request);
          EXPECT_EQ(result.gradient, step % 2 == 0 ? PERSEUS_GRADIENT_HELD : PERSEUS_GRADIENT_REDUCED);
          if (step == 1) {
            EXPECT_EQ(data[1], 1 + 11 + 2 + 12);
          }
          if (step == 3) {
            EXPECT_EQ(data[1], 21 + 31);
          }
        }
        EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
      },
      steps(2));
}

// Sums that an uneven end of an epoch has left would come into the next one, in which ranks would then step apart.
TEST_P(Accumulation, JoinDropsSums) {
  const auto body = [](int rank, perseus_context* context) {
    const int64_t count = 300;
    const auto step = [&](int number) {
      Bytes x = gradient(PERSEUS_FLOAT32, rank, number, count);
      const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
      const Result result = run_gradient(context, gradient_of(1, "g", &tensor));
      EXPECT_EQ(result.outcome.code, PERSEUS_OK) << result.outcome.message;
      return std::make_pair(result.gradient, x);
    };
    for (int number = 0; number < (rank == 0 ? 1 : 2); ++number) step(number);
    ASSERT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
    EXPECT_EQ(step(2).first, PERSEUS_GRADIENT_HELD);
    const auto [outcome, sum] = step(3);
    EXPECT_NE(outcome, PERSEUS_GRADIENT_HELD);
    for (size_t i = 0; i < 300; ++i) {
      const float expected = (value(0, 2, i) + value(0, 3, i) + value(1, 2, i) + value(1, 3, i)) / 2;
      ASSERT_EQ(read(PERSEUS_FLOAT32, sum, i), expected) << "element " << i;
    }
  };
  run_world(medium(), 2, body, steps(2));
}

TEST_P(Accumulation, TakesGradientsFromSeveralThreads) {
  constexpr int kThreads = 3, kRounds = 20;
  run_world(
      medium(), 2,
      [&](int rank, perseus_context* context) {
        std::vector<std::thread> threads;
        for (int t = 0; t < kThreads; ++t)
          threads.emplace_back([&, t] {
            const int64_t count = 300;
            std::vector<float> data(300);
            const perseus_tensor tensor{data.data(), data.data(), &count, 1, PERSEUS_FLOAT32};
            const std::string name = "thread" + std::to_string(t);
            for (int step = 0; step < 2 * kRounds; ++step) {
              for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, step + t, i);
              const Result result = run_gradient(context, gradient_of(1, name.c_str(), &tensor));
              ASSERT_EQ(result.gradient, step % 2 == 0 ? PERSEUS_GRADIENT_HELD : PERSEUS_GRADIENT_REDUCED);
              if (step % 2 == 0) continue;
              for (size_t i = 0; i < data.size(); ++i) {
                float sum = 0;
                for (int r = 0; r < 2; ++r) sum += value(r, step + t - 1, i) + value(r, step + t, i);
                ASSERT_EQ(data[i], sum / 2);
              }
            }
          });
        for (std::thread& thread : threads) thread.join();
      },
      steps(2));
}

INSTANTIATE_TEST_SUITE_P(Media, Accumulation, each_medium(), medium_name);

}  // namespace

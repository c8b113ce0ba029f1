// Top-k that corrects what it holds back by the optimizer's momentum: what an optimizer makes of the results.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "perseus/perseus.h"
#include "values.h"
#include "world.h"

namespace {

using namespace perseus_test;

using Floats = std::vector<float>;

constexpr size_t kCount = 40'000;  // some chunks
constexpr int kRanks = 2;
constexpr double kMomentum = 0.75;  // so that products are exact for a while

// Small whole numbers, of which sums and averages are exact; different ones in each step and on each rank.
Floats gradient(int rank, int step) {
  Floats x(kCount);
  for (size_t i = 0; i < kCount; ++i)
    x[i] = static_cast<float>(mix(mix(static_cast<uint64_t>(7 * rank + 31 * step)) + i) % 64) * 2.0F;
  return x;
}

// Steps of two ranks, in the last of which everything is sent.
struct Training {
  std::string correction;
  double ratio = 1.0;
  double momentum = kMomentum;
  int steps = 6;
  std::vector<std::string> more = {};
};

// Averages a gradient in place by top-k.
void average(perseus_context* context, double ratio, double momentum, Floats* x) {
  const int64_t count = static_cast<int64_t>(x->size());
  const perseus_tensor tensor{x->data(), x->data(), &count, 1, PERSEUS_FLOAT32};
  perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", &tensor, 1);
  request.op = PERSEUS_AVERAGE;
  request.gradient_of = 1;
  request.codec = PERSEUS_CODEC_TOP_K;
  request.codec_argument = ratio;
  request.momentum = momentum;
  const Outcome outcome = run(context, request);
  ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
}

// What rank 0 is given in each step. change(rank, step, &x, context) may change a gradient.
template <class Change>
std::vector<Floats> results_of(const Training& training, const Change& change) {
  std::vector<Floats> results(static_cast<size_t>(training.steps));
  WorldOptions options;
  options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1", "LIGHT_TOPK_WARMUP_STEPS=0",
                       "LIGHT_TOPK_MOMENTUM_CORRECTION=" + training.correction};
  options.overrides.insert(options.overrides.end(), training.more.begin(), training.more.end());
  run_world(
      all_media()[0], kRanks,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < training.steps; ++step) {
          Floats x = gradient(rank, step);
          change(rank, step, &x, context);
          if (step + 1 == training.steps) perseus_residuals_flush(context);
          average(context, training.ratio, training.momentum, &x);
          if (rank == 0) results[static_cast<size_t>(step)] = x;
        }
      },
      options);
  return results;
}

std::vector<Floats> results_of(const Training& training) {
  return results_of(training, [](int, int, Floats*, perseus_context*) {});
}

// The velocities of an optimizer that is given these gradients.
std::vector<std::vector<double>> velocities(const std::vector<Floats>& gradients, double momentum = kMomentum) {
  std::vector<std::vector<double>> all;
  std::vector<double> v(kCount, 0.0);
  for (const Floats& x : gradients) {
    for (size_t i = 0; i < kCount; ++i) v[i] = momentum * v[i] + static_cast<double>(x[i]);
    all.push_back(v);
  }
  return all;
}

std::vector<Floats> means(int steps) {
  std::vector<Floats> all;
  for (int step = 0; step < steps; ++step) {
    Floats of_step(kCount);
    const Floats a = gradient(0, step), b = gradient(1, step);
    for (size_t i = 0; i < kCount; ++i) of_step[i] = (a[i] + b[i]) / 2;
    all.push_back(of_step);
  }
  return all;
}

TEST(MomentumCorrection, ChangesNothingWhereAllIsSent) {
  const Training training{"1"};
  const std::vector<Floats> results = results_of(training), expected = means(training.steps);
  for (int step = 0; step < training.steps; ++step)
    for (size_t i = 0; i < kCount; i += 7)
      ASSERT_NEAR(results[static_cast<size_t>(step)][i], expected[static_cast<size_t>(step)][i], 1e-3)
          << step << ' ' << i;
}

// Each gradient has moved the parameters as far as it would have without top-k, once everything has been sent.
TEST(MomentumCorrection, DelaysButLosesNothing) {
  Training training{"1", 0.05};
  training.steps = 12;
  const auto moved = velocities(results_of(training)), expected = velocities(means(training.steps));
  size_t waits = 0;
  for (size_t i = 0; i < kCount; ++i) {
    double sum = 0, whole = 0;
    for (size_t step = 0; step < moved.size(); ++step) {
      sum += moved[step][i];
      whole += expected[step][i];
      if (step < 5 && std::abs(moved[step][i]) < 1e-3) ++waits;
    }
    ASSERT_NEAR(sum, whole, 1e-3 * whole + 1e-2) << i;
  }
  EXPECT_GT(waits, kCount) << "top-k did not hold anything back, or momentum was applied to what it had sent";
}

// What has been sent begins anew: where all is sent there is no momentum left.
TEST(MomentumCorrection, MasksTheMomentumOfWhatIsSent) {
  const Training training{"masking"};
  const auto moved = velocities(results_of(training));
  const std::vector<Floats> expected = means(training.steps);
  for (size_t step = 0; step < moved.size(); ++step)
    for (size_t i = 0; i < kCount; i += 7)
      ASSERT_NEAR(moved[step][i], static_cast<double>(expected[step][i]), 1e-3) << step << ' ' << i;
}

// Neither without the setting nor without a momentum that it can be.
TEST(MomentumCorrection, IsForThoseWhoAskForIt) {
  const std::vector<Floats> plain = results_of({"0", 0.05, 0.0});
  EXPECT_EQ(results_of({"0", 0.05, kMomentum}), plain);
  for (const double none : {0.0, 1.0, -0.5, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_EQ(results_of({"masking", 0.05, none}), plain) << none;
  EXPECT_NE(results_of({"1", 0.05, kMomentum}), plain);
}

// With several threads, small buckets and one stream come the same bits.
TEST(MomentumCorrection, GivesTheSameBitsHoweverItIsCut) {
  for (const char* correction : {"1", "masking"}) {
    Training cut{correction, 0.05};
    const std::vector<Floats> whole = results_of(cut);
    cut.more = {"PERSEUS_CODEC_THREADS=3", "PERSEUS_ALLREDUCE_STREAMS=1", "HOROVOD_FUSION_THRESHOLD=20000"};
    EXPECT_EQ(results_of(cut), whole) << correction;
  }
}

// The last result of a rank that has joined is not the others', nor are its outputs while it gives nothing.
TEST(MomentumCorrection, RanksAgreeWhileOneHasJoinedAndAfterwards) {
  constexpr int kAll = 4, kJoins = 3;
  std::vector<std::vector<Floats>> results(kAll, std::vector<Floats>(6));
  WorldOptions options;
  options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=2", "LIGHT_TOPK_WARMUP_STEPS=0",
                       "LIGHT_TOPK_MOMENTUM_CORRECTION=1", "PERSEUS_OFFLINE_NEG=0"};
  run_world(
      all_media()[0], kAll,
      [&](int rank, perseus_context* context) {
        const auto join = [&] {
          const Outcome outcome = run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0));
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        };
        for (int step = 0; step < 6; ++step) {
          if (rank == kJoins && (step == 2 || step == 3)) {
            if (step == 2) join();
            continue;
          }
          if (rank != kJoins && step == 4) join();
          Floats x = gradient(rank, step);
          average(context, 0.05, kMomentum, &x);
          results[static_cast<size_t>(rank)][static_cast<size_t>(step)] = x;
        }
      },
      options);
  for (size_t step = 0; step < 6; ++step)
    for (size_t rank = 1; rank < kAll; ++rank) {
      if (rank == kJoins && (step == 2 || step == 3)) continue;
      EXPECT_TRUE(results[rank][step] == results[0][step]) << "rank " << rank << " step " << step;
    }
}

// Only elements that are sent then move, none by what the last results were, on all ranks.
TEST(MomentumCorrection, BeginsAnewWhereOneRankHasNotAppliedAStep) {
  const auto moved = [](int forgets_on) {
    const std::vector<Floats> results = results_of({"1", 0.05}, [&](int rank, int step, Floats*, perseus_context* c) {
      if (rank == forgets_on && step == 3) perseus_momenta_forget(c, 1);
    });
    std::vector<size_t> counts;
    for (const Floats& x : results)
      counts.push_back(kCount - static_cast<size_t>(std::count(x.begin(), x.end(), 0.0F)));
    return counts;
  };
  const std::vector<size_t> going_on = moved(-1);
  for (const int rank : {0, 1}) {
    const std::vector<size_t> anew = moved(rank);
    EXPECT_EQ(anew[2], going_on[2]);
    EXPECT_LT(anew[3], kCount * 2 / 20 * 5 / 4);
    EXPECT_GT(going_on[3], anew[3] * 3 / 2);
  }
}

// Every gradient may have a NaN: then nothing but the outcome tells that there was no step.
TEST(MomentumCorrection, BeginsAnewAfterAStepThatIsSkippedForItsNan) {
  constexpr int kNan = 5;
  for (const int sums : {1, 2}) {
    const int next = kNan + sums;
    Training training{"1", 0.05};
    training.steps = next + 3;
    training.more = {"PERSEUS_ACCUMULATE_N_STEPS=" + std::to_string(sums), "PERSEUS_ALLREDUCE_NANCHECK=1",
                     "PERSEUS_ALLREDUCE_NANCHECK_ACTION=skip"};
    const auto next_of = [&](bool nan, bool forgets) {
      const auto change = [=](int rank, int step, Floats* x, perseus_context* context) {
        if (nan && rank == 1 && step == kNan) (*x)[kCount / 3] = std::numeric_limits<float>::quiet_NaN();
        if (forgets && rank == 0 && step == kNan + 1) perseus_momenta_forget(context, 1);
      };
      return results_of(training, change)[static_cast<size_t>(next)];
    };
    const Floats skipped = next_of(true, false);
    EXPECT_TRUE(std::all_of(skipped.begin(), skipped.end(), [](float value) { return std::isfinite(value); }));
    EXPECT_EQ(skipped, next_of(true, true)) << sums;
    EXPECT_NE(next_of(false, false), next_of(false, true)) << "momenta go on where nothing is skipped";
  }
}

// The optimizer is given it once, and then finite numbers again.
TEST(MomentumCorrection, OfTensorsThatAreNotCorrectedThereIsNothingToTell) {
  // A description in every step would keep a schedule from lasting.
  constexpr int64_t kSmall = 10;
  Barrier barrier(kRanks);
  WorldOptions options;
  options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1", "LIGHT_TOPK_WARMUP_STEPS=0",
                       "LIGHT_TOPK_MOMENTUM_CORRECTION=1", "PERSEUS_OFFLINE_NEG=1"};
  run_world(
      all_media()[0], kRanks,
      [&](int, perseus_context* context) {
        Floats x(kSmall);
        const auto steps = [&](int count) {
          for (int step = 0; step < count; ++step) average(context, 0.01, kMomentum, &x);
        };
        steps(20);
        const uint64_t before = messages_at_rest(context, &barrier);
        steps(5);
        EXPECT_EQ(messages_at_rest(context, &barrier), before);
        barrier.wait();
      },
      options);
}

TEST(MomentumCorrection, ForgetsWhatIsNotFinite) {
  for (const char* correction : {"1", "masking"}) {
    const auto strange = [](int rank, int step, Floats* x, perseus_context*) {
      if (rank == 1 && step == 2) (*x)[5] = std::numeric_limits<float>::infinity();
      if (rank == 0 && step == 2) (*x)[20'000] = std::numeric_limits<float>::quiet_NaN();
    };
    const std::vector<Floats> results = results_of({correction, 0.05}, strange);
    EXPECT_TRUE(std::isinf(results[2][5]) && std::isnan(results[2][20'000])) << correction;
    for (const size_t step : {0, 1, 3, 4, 5})
      for (const float value : results[step]) ASSERT_TRUE(std::isfinite(value)) << correction << ' ' << step;
  }
}

}  // namespace

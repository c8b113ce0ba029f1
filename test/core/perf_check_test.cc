// The comparison of the ranks' computing time: what counts as a step and as computing, and who is called slow.
#include "observe/perf_check.h"

#include "operation.h"

namespace {

using namespace perseus_test;
using perseus::describe_slow;
using perseus::PerfCheck;

constexpr int64_t kMs = 1'000'000;

TEST(PerfCheck, AStepIsFromOneFirstGradientToTheNextWithoutWaits) {
  PerfCheck check(2);
  EXPECT_LT(check.submitted(1, 0, "a", 1000 * kMs), 0) << "counting starts here";
  EXPECT_LT(check.submitted(1, 0, "b", 1010 * kMs), 0);
  check.waited(1020 * kMs, 1050 * kMs);
  EXPECT_LT(check.submitted(1, 0, "a", 1100 * kMs), 0);
  EXPECT_LT(check.submitted(2, 0, "a", 1110 * kMs), 0) << "of another optimizer";
  EXPECT_LT(check.submitted(1, 3, "a", 1110 * kMs), 0) << "of another group";
  check.waited(1120 * kMs, 1170 * kMs);
  EXPECT_DOUBLE_EQ(check.submitted(1, 0, "a", 1200 * kMs), 0.060);  // (200 - 80) / 2
  EXPECT_LT(check.submitted(1, 0, "a", 1250 * kMs), 0);
  EXPECT_DOUBLE_EQ(check.submitted(1, 0, "a", 1300 * kMs), 0.050) << "nothing is left over from the last time";
  check.waited(0, 500 * kMs);
  EXPECT_LT(check.submitted(1, 0, "a", 1310 * kMs), 0);
  EXPECT_GT(check.submitted(1, 0, "a", 1320 * kMs), 0) << "two threads waited at once";
}

TEST(PerfCheck, WhoIsCalledBackWaitsFromTheLastSubmissionToTheLastEnd) {
  PerfCheck check(2);
  check.ended(1, 0, 5 * kMs);
  for (int64_t step = 0; step < 3; ++step) {
    const int64_t began = step * 100 * kMs;
    if (step == 1) {
      EXPECT_LT(check.submitted(1, 0, "b", began), 0) << "this time in another order";
    }
    const double seconds = check.submitted(1, 0, "a", began);
    EXPECT_DOUBLE_EQ(seconds, step < 2 ? -1 : 0.040);
    check.ended(1, 0, began + 5 * kMs);  // while the next one is computed
    EXPECT_LT(check.submitted(1, 0, step == 1 ? "c" : "b", began + 30 * kMs), 0);
    EXPECT_DOUBLE_EQ(check.submitted(1, 3, "b", began + 50 * kMs), step < 2 ? -1 : 0.040) << "of another group";
    EXPECT_LT(check.submitted(2, 0, "b", began + 50 * kMs), 0) << "of another optimizer";
    check.ended(1, 0, began + 90 * kMs);
    check.ended(1, 3, began + 85 * kMs);
    check.ended(2, 0, began + 95 * kMs);
  }
}

TEST(PerfCheck, WhoWaitsForItsOwnDeviceComputes) {
  PerfCheck check(1);
  EXPECT_LT(check.submitted(1, 0, "a", 100 * kMs), 0);
  check.computing_until(INT64_MAX);
  check.waited(110 * kMs, 120 * kMs);
  check.computing_until(150 * kMs);
  check.waited(120 * kMs, 170 * kMs);
  check.waited(170 * kMs, 180 * kMs);
  EXPECT_DOUBLE_EQ(check.submitted(1, 0, "a", 200 * kMs), 0.070);
}

TEST(PerfCheck, AnotherOptimizerTakesOverFromOneThatIsGone) {
  PerfCheck check(1);
  EXPECT_LT(check.submitted(1, 0, "a", 0), 0);
  check.forget(2);
  EXPECT_DOUBLE_EQ(check.submitted(1, 0, "a", 10 * kMs), 0.010);
  check.forget(1);
  EXPECT_LT(check.submitted(2, 0, "x", 100 * kMs), 0);
  EXPECT_DOUBLE_EQ(check.submitted(2, 0, "x", 120 * kMs), 0.020);
}

TEST(PerfCheck, AGroupBeginsAnewWithTheNumberOfOneThatIsGone) {
  PerfCheck check(1);
  EXPECT_LT(check.submitted(1, 3, "a", 0), 0);
  check.forget_group(3);
  EXPECT_LT(check.submitted(2, 3, "a", 100 * kMs), 0);
  EXPECT_DOUBLE_EQ(check.submitted(2, 3, "a", 120 * kMs), 0.020);
}

TEST(PerfCheck, SlowIsAQuarterMoreThanTheRankInTheMiddle) {
  EXPECT_EQ(describe_slow({0.1, 0.12, 0.09}, {0, 1, 2}, 5), "");
  EXPECT_EQ(
      describe_slow({0.1, 0.2, 0.1, 0.09, 0.15}, {0, 1, 2, 3, 7}, 5),
      "[perf check] slow in the last 5 steps, computing for each: rank 1 200.000 ms (2.00 times), rank 7 150.000 ms "
      "(1.50 times); the median of 5 ranks is 100.000 ms, the fastest 90.000 ms");
  EXPECT_EQ(
      describe_slow({0.3, 0.1}, {4, 6}, 100),
      "[perf check] slow in the last 100 steps, computing for each: rank 4 300.000 ms (3.00 times); the median of 2 "
      "ranks is 100.000 ms, the fastest 100.000 ms");
  EXPECT_EQ(describe_slow({0.3, 0, 0}, {0, 1, 2}, 1), "") << "the others have joined";
}

// Rank 1 computes for ten times as long as rank 0 did, however long that is on this machine.
TEST(PerfCheck, RankZeroNamesTheRankTheOthersWaitFor) {
  for (const Medium& medium : all_media()) {
    constexpr int kSteps = 12;
    std::atomic<int64_t> computed[kSteps] = {};  // for how long, by rank 0 in each step
    WorldOptions options;
    options.overrides = {"PERSEUS_PERF_CHECK_N_STEPS=4", "HOROVOD_LOG_HIDE_TIME=1"};
    testing::internal::CaptureStderr();
    run_world(
        medium, 2,
        [&](int rank, perseus_context* context) {
          const int64_t count = 10;
          std::vector<float> data(10, 1.0f);
          const perseus_tensor tensor{data.data(), data.data(), &count, 1, PERSEUS_FLOAT32};
          for (int step = 0; step < kSteps; ++step) {
            const int64_t began = perseus::now_ns();
            if (rank == 0) {
              while (perseus::now_ns() - began < kMs) continue;
            } else {
              while (computed[step] == 0 || perseus::now_ns() - began < 10 * computed[step]) std::this_thread::yield();
            }
            perseus_request request = request_of(PERSEUS_ALLREDUCE, "w", &tensor, 1);
            request.gradient_of = 1;
            perseus_handle handle = 0;
            EXPECT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
            if (rank == 0) computed[step] = perseus::now_ns() - began;  // with whatever held it up
            EXPECT_EQ(wait(context, handle).code, PERSEUS_OK);
            perseus_handle_release(context, handle);
          }
          perseus_request barrier = request_of(PERSEUS_BARRIER, "end", nullptr, 0);
          EXPECT_EQ(run(context, barrier).code, PERSEUS_OK);
        },
        options);
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find("perseus rank 0 warning: [perf check] slow in the last 4 steps, computing for each: rank 1 "),
              std::string::npos)
        << medium.name << ": " << text;
    EXPECT_EQ(text.find("perseus rank 1"), std::string::npos) << text;
    EXPECT_EQ(text.find("for each: rank 0"), std::string::npos) << text;
  }
}

// Numbers 1 and 2, of which rank 0 is in both.
void add_overlapping_sets(perseus_context* context) {
  for (std::vector<int> ranks : {std::vector<int>{0, 1}, std::vector<int>{0, 2}}) {
    perseus_request request = request_of(PERSEUS_ADD_GROUP, "add", nullptr, 0);
    request.ranks = ranks.data();
    request.rank_count = 2;
    ASSERT_EQ(run(context, request).code, PERSEUS_OK);
  }
}

TEST(PerfCheck, RanksOfOneProcessSetAreNotTakenForThoseOfAnother) {
  WorldOptions options;
  options.overrides = {"PERSEUS_PERF_CHECK_N_STEPS=2"};
  testing::internal::CaptureStderr();
  run_world(
      all_media()[0], 3,
      [&](int rank, perseus_context* context) {
        add_overlapping_sets(context);
        const int64_t count = 1;
        float x = 1;
        const perseus_tensor tensor{&x, &x, &count, 1, PERSEUS_FLOAT32};
        const auto step_of = [&](int group) {
          perseus_request request = request_of(PERSEUS_ALLREDUCE, "w", &tensor, 1);
          request.gradient_of = 1;
          request.group = group;
          EXPECT_EQ(run(context, request).code, PERSEUS_OK);
          perseus_request barrier = request_of(PERSEUS_BARRIER, "behind the comparison", nullptr, 0);
          barrier.group = group;
          EXPECT_EQ(run(context, barrier).code, PERSEUS_OK);
        };
        for (int step = 0; step < 8; ++step) {
          std::this_thread::sleep_for(std::chrono::milliseconds(rank == 1 ? 80 : 25));
          if (rank < 2) step_of(1);
          if (rank != 1) step_of(2);
        }
        EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0)).code, PERSEUS_OK);
      },
      options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("computing for each: rank 1 "), std::string::npos) << text;
  EXPECT_EQ(text.find("computing for each: rank 2 "), std::string::npos) << text;
}

// Rank 0 trains in the first set first, rank 2 in the second alone. A rank that no comparison of its set reaches would
// count as missing.
TEST(PerfCheck, AllMembersOfAProcessSetBeginItsComparisons) {
  WorldOptions options;
  options.overrides = {"PERSEUS_PERF_CHECK_N_STEPS=1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=1"};
  run_world(
      all_media()[0], 3,
      [&](int rank, perseus_context* context) {
        add_overlapping_sets(context);
        const int64_t count = 1;
        float x = 1;
        const perseus_tensor tensor{&x, &x, &count, 1, PERSEUS_FLOAT32};
        for (int step = 0; step < 4; ++step) {
          for (const int group : {1, 2}) {
            if (rank == (group == 1 ? 2 : 1)) continue;
            perseus_request request = request_of(PERSEUS_ALLREDUCE, "w", &tensor, 1);
            request.gradient_of = static_cast<uint64_t>(group);
            request.group = group;
            const Outcome outcome = run(context, request);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          }
          if (step > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1200));
        }
      },
      options);
}

// A comparison is left over when its process set is removed, and is looked at with the next gradient of the set.
TEST(PerfCheck, AGradientOfARemovedProcessSetIsRefused) {
  WorldOptions options;
  options.overrides = {"PERSEUS_PERF_CHECK_N_STEPS=1"};
  Barrier all_ranks(3);
  run_world(
      all_media()[0], 3,
      [&](int rank, perseus_context* context) {
        const auto change = [&](perseus_kind kind, std::vector<int> ranks) {
          perseus_request request = request_of(kind, "change", nullptr, 0);
          request.ranks = ranks.data();
          request.rank_count = static_cast<int>(ranks.size());
          return run(context, request).code;
        };
        ASSERT_EQ(change(PERSEUS_ADD_GROUP, {0, 1}), PERSEUS_OK);
        const int64_t count = 1;
        float x = 1;
        const perseus_tensor tensor{&x, &x, &count, 1, PERSEUS_FLOAT32};
        perseus_request request = request_of(PERSEUS_ALLREDUCE, "w", &tensor, 1);
        request.gradient_of = 1;
        request.group = 1;
        for (int step = 0; step < 3 && rank < 2; ++step) ASSERT_EQ(run(context, request).code, PERSEUS_OK);
        perseus_request barrier = request_of(PERSEUS_BARRIER, "end", nullptr, 0);
        barrier.group = 1;  // behind the last comparison
        if (rank < 2) {
          ASSERT_EQ(run(context, barrier).code, PERSEUS_OK);
        }
        ASSERT_EQ(change(PERSEUS_REMOVE_GROUP, {1}), PERSEUS_OK);
        const Outcome outcome = run(context, request);
        EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
        EXPECT_NE(outcome.message.find("rocess set"), std::string::npos) << outcome.message;
        all_ranks.wait();  // whoever leaves ends the world
      },
      options);
}

}  // namespace

// A NaN in one rank's gradient: all ranks learn tensor and rank with the result, and do the same about it.
#include <cmath>
#include <limits>

#include "operation.h"

namespace {

using namespace perseus_test;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Result {
  Outcome outcome;
  int gradient = -1;
};

// Submits all, then waits for all: they share a bucket.
std::vector<Result> run_gradients(perseus_context* context, const std::vector<std::string>& names,
                                  std::vector<std::vector<float>>* data, bool grouped = false,
                                  int codec = PERSEUS_CODEC_SETTINGS) {
  std::vector<int64_t> counts;
  std::vector<perseus_tensor> tensors;
  for (std::vector<float>& values : *data) counts.push_back(static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < data->size(); ++i)
    tensors.push_back({(*data)[i].data(), (*data)[i].data(), &counts[i], 1, PERSEUS_FLOAT32});
  std::vector<perseus_handle> handles(names.size());
  std::vector<Result> results(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    perseus_request request =
        request_of(PERSEUS_ALLREDUCE, names[i].c_str(), &tensors[i], grouped ? static_cast<int>(tensors.size()) : 1);
    request.gradient_of = 1;
    request.codec = codec;
    results[i].outcome = submit(context, request, &handles[i]);
    EXPECT_EQ(results[i].outcome.code, PERSEUS_OK) << results[i].outcome.message;
  }
  for (size_t i = 0; i < names.size(); ++i) {
    results[i].outcome = wait(context, handles[i]);
    results[i].gradient = perseus_handle_gradient(context, handles[i]);
    perseus_handle_release(context, handles[i]);
  }
  return results;
}

WorldOptions with(const std::string& action, std::vector<std::string> more = {}) {
  WorldOptions options;
  options.overrides = {"PERSEUS_ALLREDUCE_DTYPE=1", "PERSEUS_ALLREDUCE_NANCHECK=1",
                       "PERSEUS_ALLREDUCE_NANCHECK_ACTION=" + action, "HOROVOD_LOG_HIDE_TIME=1"};
  options.overrides.insert(options.overrides.end(), more.begin(), more.end());
  return options;
}

size_t times(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

class NanCheck : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }

  // Four steps of three gradients; in steps 1 and 3 the last rank's second one has a NaN. `expect` sees every result
  // of a gradient with a NaN; returns standard error.
  std::string run_steps(int size, const WorldOptions& options, const std::function<void(const Result&)>& expect) const {
    testing::internal::CaptureStderr();
    run_world(
        medium(), size,
        [&](int rank, perseus_context* context) {
          for (int step = 0; step < 4; ++step) {
            std::vector<std::vector<float>> data;
            for (size_t i = 0; i < 3; ++i) data.emplace_back(20000 * i + 9, static_cast<float>(rank + step));
            const bool bad = step % 2 == 1;
            if (bad && rank == size - 1) data[1][20005] = kNan;
            const std::vector<Result> results = run_gradients(context, {"a", "b", "c"}, &data);
            for (size_t i = 0; i < 3; ++i) {
              if (bad && i == 1) {
                expect(results[i]);
                continue;
              }
              ASSERT_EQ(results[i].outcome.code, PERSEUS_OK) << results[i].outcome.message;
              EXPECT_EQ(results[i].gradient, PERSEUS_GRADIENT_REDUCED);
              for (float value : data[i])
                ASSERT_EQ(value, static_cast<float>(size * step + size * (size - 1) / 2)) << "step " << step;
            }
          }
        },
        options);
    return testing::internal::GetCapturedStderr();
  }
};

TEST_P(NanCheck, ReportsTensorAndRankOnEveryRank) {
  for (int size : {1, 2, 3}) {
    const std::string text = run_steps(size, with("report"), [](const Result& result) {
      EXPECT_EQ(result.outcome.code, PERSEUS_OK) << result.outcome.message;
      EXPECT_EQ(result.gradient, PERSEUS_GRADIENT_REDUCED);
    });
    for (int rank = 0; rank < size; ++rank)
      EXPECT_EQ(
          times(text, "perseus rank " + std::to_string(rank) +
                          " warning: [nancheck] NaN in the gradient of b on rank " + std::to_string(size - 1) + "\n"),
          2u)
          << text;
    EXPECT_EQ(times(text, "\n"), 2u * static_cast<size_t>(size)) << text;
  }
}

TEST_P(NanCheck, RaisesOnEveryRank) {
  for (int size : {1, 2, 3}) {
    const std::string text = run_steps(size, with("raise"), [&](const Result& result) {
      EXPECT_EQ(result.outcome.code, PERSEUS_NAN);
      EXPECT_EQ(result.outcome.message, "[nancheck] NaN in the gradient of b on rank " + std::to_string(size - 1));
    });
    EXPECT_EQ(text, "");
  }
}

TEST_P(NanCheck, SkipsOnEveryRank) {
  for (int size : {1, 2, 3}) {
    const std::string text = run_steps(size, with("skip"), [](const Result& result) {
      EXPECT_EQ(result.outcome.code, PERSEUS_OK) << result.outcome.message;
      EXPECT_EQ(result.gradient, PERSEUS_GRADIENT_SKIPPED);
    });
    EXPECT_EQ(times(text, "this step is skipped on every rank"), 2u * static_cast<size_t>(size)) << text;
  }
}

TEST_P(NanCheck, LooksAtGatheredGradientsToo) {
  for (const std::string action : {"raise", "skip"}) {
    run_world(
        medium(), 3,
        [&](int rank, perseus_context* context) {
          for (int step = 0; step < 4; ++step) {  // other rows in every step, none at all on a rank
            const bool bad = step % 2 == 1;
            const int64_t rows = (rank + step) % 3;
            std::vector<float> values(static_cast<size_t>(rows), static_cast<float>(10 * step + rank));
            if (bad && rows == 2) values[1] = kNan;
            const perseus_tensor tensor{values.data(), nullptr, &rows, 1, PERSEUS_FLOAT32};
            perseus_request request = request_of(PERSEUS_ALLGATHER, "values", &tensor, 1);
            request.gradient_of = 1;
            perseus_handle handle = 0;
            ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
            const Outcome outcome = wait(context, handle);
            if (bad && action == "raise") {
              EXPECT_EQ(outcome.message,
                        "[nancheck] NaN in the gradient of values on rank " + std::to_string((5 - step) % 3));
            } else {
              EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
              EXPECT_EQ(perseus_handle_gradient(context, handle),
                        bad ? PERSEUS_GRADIENT_SKIPPED : PERSEUS_GRADIENT_REDUCED);
            }
            perseus_handle_release(context, handle);
          }
        },
        with(action));
  }
}

TEST_P(NanCheck, NamesAllRanksAndTheTensorWithinAGroup) {
  run_world(
      medium(), 3,
      [&](int rank, perseus_context* context) {
        std::vector<std::vector<float>> data(3, std::vector<float>(5, 1.0f));
        if (rank != 1) data[static_cast<size_t>(rank)][rank == 0 ? 0 : 4] = kNan;
        const std::vector<Result> results = run_gradients(context, {"all"}, &data, true);
        EXPECT_EQ(results[0].outcome.message,
                  "[nancheck] NaN in the gradient of all (tensor 0 of 3 on rank 0, tensor 2 of 3 on rank 2)");
      },
      with("raise"));
}

TEST_P(NanCheck, LooksAtTheSumOfSeveralSteps) {
  run_world(
      medium(), 2,
      [&](int rank, perseus_context* context) {
        const auto step = [&](float value) {
          std::vector<std::vector<float>> data(1, std::vector<float>(3, rank == 1 ? value : 1.0f));
          return run_gradients(context, {"w"}, &data)[0];
        };
        EXPECT_EQ(step(kNan).gradient, PERSEUS_GRADIENT_HELD);
        EXPECT_EQ(step(1).outcome.code, PERSEUS_NAN);
        EXPECT_EQ(step(kInfinity).gradient, PERSEUS_GRADIENT_HELD);
        EXPECT_EQ(step(-kInfinity).outcome.code, PERSEUS_NAN) << "made by summing up";
        EXPECT_EQ(step(1).gradient, PERSEUS_GRADIENT_HELD);
        EXPECT_EQ(step(kInfinity).gradient, PERSEUS_GRADIENT_REDUCED) << "infinity is no NaN";
      },
      with("raise", {"PERSEUS_ACCUMULATE_N_STEPS=2"}));
}

// No rank has a NaN, the sum does: the same everywhere, through a codec too, so all ranks do the same.
TEST_P(NanCheck, LooksAtTheSumOverRanks) {
  for (const std::string dtype : {"1", "0"}) {
    for (const std::string action : {"raise", "skip"}) {
      testing::internal::CaptureStderr();
      run_world(
          medium(), 3,
          [&](int rank, perseus_context* context) {
            for (int step = 0; step < 3; ++step) {
              std::vector<std::vector<float>> data(2, std::vector<float>(20000, static_cast<float>(rank + 1)));
              if (rank < 2) data[1][19999] = rank == 0 || step != 1 ? kInfinity : -kInfinity;
              const std::vector<Result> results = run_gradients(context, {"two"}, &data, true);
              if (step == 1 && action == "raise")
                EXPECT_EQ(results[0].outcome.message,
                          "[nancheck] NaN in the gradient of two (tensor 1 of 2 in the sum over all ranks)");
              else
                EXPECT_EQ(results[0].gradient, step == 1 ? PERSEUS_GRADIENT_SKIPPED : PERSEUS_GRADIENT_REDUCED) << step;
              EXPECT_EQ(data[0][19999], 6);
              EXPECT_EQ(std::isnan(data[1][19999]), step == 1);
            }
          },
          with(action, {"PERSEUS_ALLREDUCE_DTYPE=" + dtype}));
      EXPECT_EQ(times(testing::internal::GetCapturedStderr(), "in the sum over all ranks"), action == "skip" ? 3u : 0u);
    }
  }
}

// Sums inside hosts, in which ranks 0 and 1 make a NaN in the second of three steps. look(rank, step, result, data)
// sees the results. Returns what was logged.
template <class Look>
std::string logged_of_sums_inside(int size, const std::vector<std::string>& settings, const Look& look) {
  testing::internal::CaptureStderr();
  run_world(
      all_media()[0], size,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 3; ++step) {
          std::vector<std::vector<float>> data(2, std::vector<float>(20000, static_cast<float>(rank + 1)));
          if (step == 1 && rank < 2) data[1][19999] = rank == 0 ? kInfinity : -kInfinity;
          look(rank, step, run_gradients(context, {"two"}, &data, true, PERSEUS_CODEC_INSIDE)[0], data);
        }
      },
      with("skip", settings));
  return testing::internal::GetCapturedStderr();
}

TEST(NanCheckOfHosts, ASumOfASingleHostIsThatOfAllRanks) {
  const std::string text = logged_of_sums_inside(
      3, {}, [](int, int step, const Result& result, const std::vector<std::vector<float>>& data) {
        EXPECT_EQ(result.gradient, step == 1 ? PERSEUS_GRADIENT_SKIPPED : PERSEUS_GRADIENT_REDUCED);
        EXPECT_EQ(data[0][19999], 6);
      });
  EXPECT_EQ(times(text, "(tensor 1 of 2 in the sum over all ranks): this step is skipped on every rank\n"), 3u) << text;
}

// Other hosts do not see it, and count a step.
TEST(NanCheckOfHosts, ZerosTakeThePlaceOfASumThatOneHostAloneWouldSkip) {
  const std::string text =
      logged_of_sums_inside(4, {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=2"},
                            [](int rank, int step, const Result& result, const std::vector<std::vector<float>>& data) {
                              EXPECT_EQ(result.gradient, PERSEUS_GRADIENT_REDUCED);
                              const float sum = rank < 2 ? 6 : 14;  // times the number of hosts
                              EXPECT_EQ(data[0][19999], sum);
                              for (float value : data[1]) ASSERT_EQ(value, step == 1 && rank < 2 ? 0 : sum);
                            });
  EXPECT_EQ(times(text, "(tensor 1 of 2 in the sum over the ranks of this host): zeros take its place\n"), 2u) << text;
}

TEST_P(NanCheck, RanksThatHaveJoinedHearOfItToo) {
  testing::internal::CaptureStderr();
  run_world(
      medium(), 3,
      [&](int rank, perseus_context* context) {
        // In the first step all are there; then rank 2 has joined, and ranks 0 and 1 take steps with and without a NaN.
        for (int step = 0; step < (rank == 2 ? 1 : 4); ++step) {
          std::vector<std::vector<float>> data(2, std::vector<float>(100, static_cast<float>(rank + 1)));
          if (step == 2 && rank == 1) data[0][50] = kNan;
          const std::vector<Result> results = run_gradients(context, {"a", "b"}, &data);
          EXPECT_EQ(results[0].gradient, step == 2 ? PERSEUS_GRADIENT_SKIPPED : PERSEUS_GRADIENT_REDUCED) << step;
          EXPECT_EQ(results[1].gradient, PERSEUS_GRADIENT_REDUCED);
          EXPECT_EQ(data[1][99], step == 0 ? 6 : 3);
        }
        EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
      },
      with("skip"));
  const std::string text = testing::internal::GetCapturedStderr();
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(
        times(text, "perseus rank " + std::to_string(rank) + " warning: [nancheck] NaN in the gradient of a on rank 1"),
        1u)
        << text;
}

// Where an order is frozen nothing is said any more: who finds a NaN ends that.
TEST_P(NanCheck, EndsAFrozenSchedule) {
  constexpr int kLearn = 10, kSilent = 3;  // steps: after a schedule was frozen nothing but data is sent
  Barrier barrier(3);
  run_world(
      medium(), 3,
      [&](int rank, perseus_context* context) {
        // One after the other, so that each is a batch of its own, however slowly a rank runs.
        const auto step = [&](bool bad) {
          Outcome outcome;
          for (size_t i = 0; i < 3; ++i) {
            std::vector<std::vector<float>> data(1, std::vector<float>(20000 * i + 9, static_cast<float>(rank + 1)));
            if (bad && i == 1) data[0][20005] = kNan;
            const Outcome own = run_gradients(context, {std::string(1, static_cast<char>('a' + i))}, &data)[0].outcome;
            EXPECT_EQ(data[0][0], 6) << i;
            if (i == 1) outcome = own;
            else EXPECT_EQ(own.code, PERSEUS_OK) << own.message;
          }
          return outcome;
        };
        for (int bad = 0; bad < 3; ++bad) {  // a rank: what breaks soon is learnt again later
          for (int i = 0; i < kLearn << bad; ++i) EXPECT_EQ(step(false).code, PERSEUS_OK);
          const uint64_t before = messages_at_rest(context, &barrier);
          for (int i = 0; i < kSilent; ++i) EXPECT_EQ(step(false).code, PERSEUS_OK);
          EXPECT_EQ(messages_at_rest(context, &barrier), before) << "no schedule: this test shows nothing";
          const Outcome found = step(rank == bad);
          EXPECT_EQ(found.code, PERSEUS_NAN);
          EXPECT_EQ(found.message, "[nancheck] NaN in the gradient of b on rank " + std::to_string(bad));
        }
      },
      with("raise", {"PERSEUS_OFFLINE_NEG=1"}));
}

TEST_P(NanCheck, IsForGradientsAndWhereAskedFor) {
  const auto ordinary = [&](perseus_context* context, uint64_t owner) {
    const int64_t count = 1;
    float value = kNan;
    const perseus_tensor tensor{&value, &value, &count, 1, PERSEUS_FLOAT32};
    perseus_request request = request_of(PERSEUS_ALLREDUCE, "x", &tensor, 1);
    request.gradient_of = owner;
    EXPECT_EQ(run(context, request).code, PERSEUS_OK);
    EXPECT_TRUE(std::isnan(value));
  };
  testing::internal::CaptureStderr();
  run_world(medium(), 2, [&](int, perseus_context* context) { ordinary(context, 0); }, with("raise"));
  WorldOptions exact;
  exact.overrides = {"PERSEUS_ALLREDUCE_DTYPE=1"};
  run_world(medium(), 2, [&](int, perseus_context* context) { ordinary(context, 1); }, exact);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(NanCheckSettings, AnswerToTheMisspeltNameAndMustAgree) {
  std::atomic<int> refused{0};
  WorldOptions options;
  options.overrides = {"PERSEUS_ALLREDUCE_DTYPE=1", "PERSEUS_ALLREDUCE_NANHECK=1"};
  run_world(
      all_media()[0], 1,
      [](int, perseus_context* context) {
        EXPECT_EQ(perseus_context_setting(context, "PERSEUS_ALLREDUCE_NANCHECK"), 1);
      },
      options);
  const std::string name = unique_name();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      perseus_context* context = nullptr;
      const std::string mine = rank == 0 ? "PERSEUS_ACCUMULATE_N_STEPS=2" : "PERSEUS_ACCUMULATE_N_STEPS=3";
      if (create_context(all_media()[0], name, rank, 2, 0, {mine}, &context) == PERSEUS_INVALID_ARGUMENT) {
        EXPECT_NE(std::string(perseus_error_message()).find("configured differently: PERSEUS_ACCUMULATE_N_STEPS="),
                  std::string::npos);
        ++refused;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused, 2);
}

INSTANTIATE_TEST_SUITE_P(Media, NanCheck, each_medium(), medium_name);

}  // namespace

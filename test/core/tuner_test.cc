// The tuner: all ranks settle on one choice, from trials that change no bits; what it writes down can be replayed.
#include "execution/tuner.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <utility>

#include "base/clock.h"
#include "control/negotiation.h"
#include "operation.h"

namespace {

using namespace perseus_test;
using perseus::Tuner;
using perseus::TunerSettings;
using perseus::Tuning;

constexpr size_t kMiB = 1024 * 1024;

// One group's tuner, given the steps of a model of two gradients.
class Steps {
 public:
  explicit Steps(const TunerSettings& settings, size_t bytes = 64 * kMiB, bool nccl = false) : tuner(settings) {
    conditions_.nccl = nccl;
    for (size_t i = 0; i < 2; ++i) {
      names_[i] = "g" + std::to_string(i);
      entries_[i].text = &names_[i];
      entries_[i].description.gradient = true;
      entries_[i].description.tensors.push_back({perseus::DType::kUInt8, {static_cast<int64_t>(bytes / 2)}});
    }
    told_.text = &names_[2];
  }

  // A step that takes so many microseconds.
  void step(int64_t microseconds) {
    step([microseconds](const Tuning&) { return microseconds; });
  }
  // Under the setting that holds in it.
  void step(const std::function<int64_t(const Tuning&)>& microseconds) {
    tuner.agreed({&entries_[0]}, conditions_, now_);
    tuner.agreed({&entries_[1]}, conditions_, now_);
    now_ += microseconds(tuner.in_force().tuning) * perseus::kMicrosecond;
    if (tuner.measuring()) tuner.done(now_);
  }
  void lose_nccl() { conditions_.nccl = false; }
  void hear(const std::vector<uint32_t>& times) {
    told_.description.times = times;
    tuner.agreed({&told_}, conditions_, now_);
  }
  void resize(size_t bytes) { entries_[1].description.tensors[0].shape[0] = static_cast<int64_t>(bytes); }

  Tuner tuner;

 private:
  std::string names_[3];
  perseus::Entry entries_[2], told_;
  Tuner::Conditions conditions_;
  int64_t now_ = 1;
};

TunerSettings tries_all() {
  TunerSettings settings;
  settings.buckets = settings.streams = true;
  return settings;
}

// Microseconds of a step under a setting: the best is 16 MiB on 4 streams.
int64_t cost(const Tuning& tuning) { return tuning.bucket_bytes == 16 * kMiB ? 70 : 100 + tuning.streams; }

TEST(Tuner, SettlesOnTheFastestWithinTwentyStepsFromTheTimesOfTheSlowestRank) {
  Steps steps(tries_all());
  int count = 0;
  while (!steps.tuner.has_times()) {
    ASSERT_LT(++count, 20);
    steps.step(cost);
  }
  std::vector<uint32_t> times = steps.tuner.take_times();
  EXPECT_EQ(steps.tuner.in_force().tuning, Tuning());  // until all ranks have told theirs
  ASSERT_EQ(times.size(), 10U);
  steps.hear(times);
  ASSERT_TRUE(steps.tuner.has_decision());
  const Tuner::Decision decision = steps.tuner.take_decision();
  EXPECT_EQ(decision.chosen, (Tuning{16 * kMiB, 4})) << decision.why;
  EXPECT_EQ(steps.tuner.in_force().tuning, decision.chosen);
  for (int i = 0; i < 5; ++i) steps.step(1000);
  EXPECT_EQ(steps.tuner.in_force().tuning, decision.chosen);
  EXPECT_FALSE(steps.tuner.has_decision());
}

TEST(Tuner, KeepsWhatItBeganWithUnlessSomethingIsClearlyFaster) {
  Steps steps(tries_all());
  while (!steps.tuner.has_times()) steps.step(100);
  std::vector<uint32_t> times = steps.tuner.take_times();
  for (size_t i = 0; i < times.size(); ++i) times[i] = i % 5 == 0 ? 100 : 96;
  steps.hear(times);
  EXPECT_EQ(steps.tuner.in_force().tuning, Tuning());
  EXPECT_NE(steps.tuner.take_decision().why.find("nothing that was tried is faster"), std::string::npos);
}

TEST(Tuner, TriesNothingWhereNothingIsToBeGained) {
  const auto settled = [](TunerSettings settings, size_t bytes) {
    Steps steps(settings, bytes);
    for (int i = 0; i < 4; ++i) {
      steps.step(100);
      EXPECT_EQ(steps.tuner.in_force().tuning.streams, 4);
      EXPECT_FALSE(steps.tuner.measuring());
    }
    EXPECT_TRUE(steps.tuner.has_decision());
    return steps.tuner.take_decision().why;
  };
  EXPECT_NE(settled(tries_all(), kMiB).find("moves too little"), std::string::npos);
  EXPECT_NE(settled(TunerSettings(), 64 * kMiB).find("nothing is left to choose"), std::string::npos);
}

// Steps until it has settled; every rank's times are these.
Tuner::Decision settle(Steps* steps, const std::function<int64_t(const Tuning&)>& microseconds) {
  for (int i = 0; i < 40 && !steps->tuner.has_decision(); ++i) {
    steps->step(microseconds);
    if (steps->tuner.has_times()) steps->hear(steps->tuner.take_times());
  }
  EXPECT_TRUE(steps->tuner.has_decision());
  return steps->tuner.take_decision();
}

TEST(Tuner, TriesNcclWhereAllRanksMayHaveIt) {
  TunerSettings settings;
  settings.nccl = true;
  for (const int64_t by_nccl : {50, 200}) {
    // Gradients are submitted before a step begins, with the share that held then.
    int submitted_with = 0;
    const auto cost = [by_nccl, &submitted_with](const Tuning& tuning) {
      const bool kept = std::exchange(submitted_with, tuning.nccl_percent) > 0;
      return tuning.nccl_percent == 100 && kept ? by_nccl : 100;
    };
    Steps steps(settings, 64 * kMiB, true);
    const Tuner::Decision decision = settle(&steps, cost);
    EXPECT_EQ(decision.chosen, (Tuning{Tuning().bucket_bytes, 4, by_nccl < 100 ? 100 : 0})) << decision.why;
    EXPECT_EQ(decision.why.find("100 % of them by NCCL between hosts") != std::string::npos, by_nccl < 100);
    EXPECT_EQ(decision.trials.size(), 4U);
  }
  Steps steps(settings);
  EXPECT_NE(settle(&steps, [](const Tuning&) { return 100; }).why.find("nothing is left to choose"), std::string::npos);
}

// What seemed fast was not NCCL.
TEST(Tuner, DoesNotChooseNcclThatHasNotJoinedTheRanks) {
  TunerSettings settings;
  settings.nccl = settings.shares = true;
  Steps steps(settings, 64 * kMiB, true);
  const auto cost = [&steps](const Tuning& tuning) {
    if (tuning.nccl_percent > 0) steps.lose_nccl();
    return 100 - tuning.nccl_percent / 2;
  };
  const Tuner::Decision decision = settle(&steps, cost);
  EXPECT_EQ(decision.chosen, Tuning()) << decision.why;
  EXPECT_EQ(decision.trials.size(), 4U);
}

// Links whose traffic goes side by side: a step takes as long as the slower part.
TEST(Tuner, DividesBetweenTwoKindsOfLinkByTheirSpeeds) {
  TunerSettings settings;
  settings.nccl = settings.shares = settings.streams = true;
  const auto beside = [](const Tuning& tuning) {
    const int64_t own = (100 - tuning.nccl_percent) * (tuning.streams == 8 ? 8 : 10), nccl = tuning.nccl_percent * 20;
    return std::max(own, nccl);
  };
  Steps steps(settings, 64 * kMiB, true);
  const Tuner::Decision decision = settle(&steps, beside);
  EXPECT_EQ(decision.chosen, (Tuning{Tuning().bucket_bytes, 8, 33})) << decision.why;
  EXPECT_EQ(decision.trials.size(), 8U + 4U);
  EXPECT_EQ(steps.tuner.in_force().tuning, decision.chosen);
  // One link that both share.
  Steps shared(settings, 64 * kMiB, true);
  const Tuner::Decision alone = settle(&shared, [](const Tuning& tuning) { return 1000 + 10 * tuning.nccl_percent; });
  EXPECT_EQ(alone.chosen, Tuning()) << alone.why;
}

TEST(Tuner, StepsThatDifferAreNotCompared) {
  Steps steps(tries_all());
  for (int i = 0; i < 5; ++i) steps.step(100);
  EXPECT_TRUE(steps.tuner.measuring());
  steps.resize(kMiB);
  steps.step(100);
  steps.step(100);
  EXPECT_FALSE(steps.tuner.measuring());
  EXPECT_EQ(steps.tuner.in_force().tuning, Tuning());
  EXPECT_NE(steps.tuner.take_decision().why.find("steps differ"), std::string::npos);
}

TEST(Tuner, FusionIsAPartOfAStepsGradients) {
  TunerSettings settings;
  settings.parts = 4;
  for (const size_t mebibytes : {64, 2048}) {  // above and below what a bucket holds otherwise
    Steps steps(settings, mebibytes * kMiB);
    steps.step(100);
    EXPECT_EQ(steps.tuner.in_force().tuning, Tuning());
    EXPECT_EQ(steps.tuner.in_force().bucket_bytes(kMiB), kMiB);
    steps.step(100);
    EXPECT_EQ(steps.tuner.in_force().tuning.bucket_bytes, mebibytes / 4 * kMiB + 1);
    EXPECT_EQ(steps.tuner.in_force().bucket_bytes(kMiB), mebibytes / 4 * kMiB + 1);
  }
  settings.most_bytes = 10 * kMiB;
  Steps steps(settings);
  for (int i = 0; i < 2; ++i) steps.step(100);
  EXPECT_EQ(steps.tuner.in_force().tuning.bucket_bytes, 10 * kMiB) << "HOROVOD_FUSION_THRESHOLD, too";
}

struct Gradient {
  std::string name;
  size_t bytes;
  perseus::Kind kind = perseus::Kind::kAllreduce;
};

// What one rank knows of gradients that rounds make ready one after the other.
void agree(Tuner* tuner, const std::vector<Gradient>& gradients) {
  for (const Gradient& gradient : gradients) {
    perseus::Entry entry;
    entry.text = &gradient.name;
    entry.description.kind = gradient.kind;
    entry.description.gradient = true;
    entry.description.tensors.push_back({perseus::DType::kUInt8, {static_cast<int64_t>(gradient.bytes)}});
    tuner->agreed({&entry}, {}, 1);
  }
}

TEST(Tuner, RowsThatEachRankHasOfASparseGradientDecideNothing) {
  TunerSettings settings = tries_all();
  for (const int64_t parts : {0, 4}) {
    settings.parts = parts;
    Tuner tuners[] = {Tuner(settings), Tuner(settings)};
    for (size_t step = 0; step < 20; ++step) {
      for (size_t rank = 0; rank < 2; ++rank) {
        const Gradient rows{"s", (1 + rank * step) * kMiB, perseus::Kind::kAllgather};
        agree(&tuners[rank], {rows, {"a", 32 * kMiB}, {"b", 32 * kMiB}});
      }
      EXPECT_EQ(tuners[0].in_force().tuning, tuners[1].in_force().tuning) << "step " << step;
      EXPECT_EQ(tuners[0].trying(), tuners[1].trying()) << "step " << step;
    }
    for (Tuner& tuner : tuners) {
      EXPECT_TRUE(tuner.has_times());
      EXPECT_EQ(tuner.in_force().tuning.bucket_bytes, parts == 0 ? Tuning().bucket_bytes : 16 * kMiB + 1);
    }
  }
}

TEST(Tuner, WhatComesBeforeTheTrainingIsNoStepOfIt) {
  const std::vector<Gradient> once{{"a", 8 * kMiB}, {"b", 8 * kMiB}};
  const std::vector<Gradient> training{{"c", 32 * kMiB}, {"d", 16 * kMiB}, {"e", 16 * kMiB}};
  TunerSettings settings = tries_all();
  settings.parts = 4;
  Tuner tuner(settings);
  agree(&tuner, once);
  for (int step = 0; step < 30 && !tuner.has_times(); ++step) agree(&tuner, training);
  ASSERT_TRUE(tuner.has_times());
  EXPECT_EQ(tuner.in_force().tuning.bucket_bytes, 16 * kMiB + 1);
}

TEST(Tuner, GivesUpWhereTheFirstGradientDoesNotComeAgain) {
  for (const int earlier : {2, 3, 4, 5, 8}) {
    SCOPED_TRACE(earlier);
    Tuner tuner(tries_all());
    for (int step = 0; step < earlier; ++step) agree(&tuner, {{"a", 32 * kMiB}, {"b", 32 * kMiB}});
    for (int step = 0; step < 3; ++step) agree(&tuner, {{"c", 32 * kMiB}, {"d", 16 * kMiB}});
    EXPECT_FALSE(tuner.trying());
    EXPECT_EQ(tuner.in_force().tuning, Tuning());
    EXPECT_NE(tuner.take_decision().why.find("steps differ"), std::string::npos);
  }
}

TEST(Tuner, AnOrderThatChangesEveryStepHidesNoStep) {
  std::vector<Gradient> gradients{{"a", 8 * kMiB}, {"b", 16 * kMiB}, {"c", 40 * kMiB}};
  TunerSettings settings;
  settings.parts = 4;
  Tuner tuner(settings);
  for (int step = 0; step < 4; ++step) {
    agree(&tuner, gradients);
    std::rotate(gradients.begin(), gradients.begin() + 1, gradients.end());
  }
  EXPECT_FALSE(tuner.trying());
  EXPECT_EQ(tuner.in_force().tuning.bucket_bytes, 16 * kMiB + 1);
}

// ---- the whole of it ----

constexpr size_t kGradients = 6, kElements = 200000;  // 4.6 MiB
constexpr int kSteps = 14;

// Every rank's gradients after each step, one after the other.
std::vector<std::vector<float>> train(const Medium& medium, int size, perseus_codec codec,
                                      const std::vector<std::string>& settings) {
  std::vector<std::vector<float>> results(static_cast<size_t>(size));
  WorldOptions options;
  options.overrides = settings;
  run_world(
      medium, size,
      [&](int rank, perseus_context* context) {
        std::vector<std::vector<float>> gradients(kGradients, std::vector<float>(kElements));
        for (int step = 0; step < kSteps; ++step) {
          perseus_handle handles[kGradients];
          const int64_t count = kElements;
          for (size_t g = 0; g < kGradients; ++g) {
            for (size_t i = 0; i < kElements; ++i)
              gradients[g][i] = static_cast<float>(
                  static_cast<double>(mix(g * 1000003 + i * 17 + static_cast<size_t>(step * 64 + rank)) >> 32) * 1e-9);
            const perseus_tensor tensor{gradients[g].data(), gradients[g].data(), &count, 1, PERSEUS_FLOAT32};
            const std::string name = "g" + std::to_string(g);
            perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
            request.op = PERSEUS_AVERAGE;
            request.gradient_of = 1;
            request.codec = codec;
            const Outcome outcome = submit(context, request, &handles[g]);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          }
          for (size_t g = 0; g < kGradients; ++g) {
            const Outcome outcome = wait(context, handles[g]);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            perseus_handle_release(context, handles[g]);
            std::vector<float>& mine = results[static_cast<size_t>(rank)];
            for (size_t i = static_cast<size_t>(step); i < kElements; i += 37) mine.push_back(gradients[g][i]);
          }
        }
      },
      options);
  return results;
}

std::string temporary(const std::string& name) {
  return testing::TempDir() + "perseus_tuner_" + std::to_string(getpid()) + unique_name() + name;
}

std::string content(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

TEST(TunedWorld, BitsAreThoseOfAnUntunedOne) {
  for (const Medium& medium : {all_media()[0], all_media()[2]}) {
    if (kThreadSanitizer && std::string(medium.name) == "tcp") continue;
    for (const perseus_codec codec : {PERSEUS_CODEC_EXACT, PERSEUS_CODEC_INT8}) {
      SCOPED_TRACE(medium.name);
      const std::string log = temporary("log.csv"), trace = temporary("trace.json");
      const std::vector<std::string> groups = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1"};
      std::vector<std::string> on = groups, off = groups;
      on.insert(on.end(), {"HOROVOD_AUTOTUNE=1", "PERSEUS_AUTOTUNE_LOG=" + log, "HOROVOD_TIMELINE=" + trace});
      off.push_back("HOROVOD_AUTOTUNE=0");
      const auto tuned = train(medium, 2, codec, on);
      const auto plain = train(medium, 2, codec, off);
      for (const auto& of_rank : tuned) {
        ASSERT_EQ(of_rank.size(), plain[0].size());
        EXPECT_EQ(std::memcmp(of_rank.data(), plain[0].data(), plain[0].size() * sizeof(float)), 0);
      }
      // Five settings were tried twice, and one of them was chosen.
      const std::string written = content(log);
      EXPECT_EQ(std::count(written.begin(), written.end(), '\n'), 11) << written;
      const Tuning chosen = perseus::read_tuner_log(log);
      const std::string events = content(trace);
      EXPECT_NE(events.find("\"name\": \"TUNED\""), std::string::npos);
      EXPECT_NE(events.find("\"bucket_bytes\": " + std::to_string(chosen.bucket_bytes) +
                            ", \"streams\": " + std::to_string(chosen.streams)),
                std::string::npos);
      std::remove(log.c_str());
      std::remove(trace.c_str());
    }
  }
}

struct Ranks {
  int size = 2, inner = 1;
};

float sum_of(size_t value, int ranks) {
  size_t sum = 0;
  for (size_t rank = 0; rank < static_cast<size_t>(ranks); ++rank) sum += (value + 5 * rank) % 9;
  return static_cast<float>(sum);
}

// Buckets of a step of 24 tensors, which are one request and so ready together, after the first step.
uint64_t buckets_of_a_step(const Medium& medium, perseus_codec codec, const std::vector<std::string>& settings,
                           int64_t count = 65536, const Ranks& ranks = {}) {
  constexpr int kTensors = 24;
  const bool large = count > 65536;  // then not all is looked at
  const int counted = large ? 1 : 3;
  uint64_t buckets = 0;
  WorldOptions options;
  options.overrides = settings;
  options.overrides.insert(options.overrides.end(), {"HOROVOD_AUTOTUNE=0", "LIGHT_2D_ALLREDUCE=1",
                                                     "LIGHT_INTRA_SIZE=" + std::to_string(ranks.inner)});
  run_world(
      medium, ranks.size,
      [&](int rank, perseus_context* context) {
        std::vector<float> gradients(static_cast<size_t>(kTensors * count));
        const size_t apart = large ? 1009 : 1;
        std::vector<perseus_tensor> tensors;
        for (int i = 0; i < kTensors; ++i)
          tensors.push_back({gradients.data() + i * count, gradients.data() + i * count, &count, 1, PERSEUS_FLOAT32});
        perseus_stats before{}, after{};
        before.struct_size = after.struct_size = sizeof before;
        for (int step = 0; step < 2 + counted; ++step) {
          if (step == 2) perseus_context_stats(context, &before);
          for (size_t i = 0; i < gradients.size(); i += apart)
            gradients[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank * 5 + step)) % 9);
          perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", tensors.data(), kTensors);
          request.gradient_of = 1;
          request.codec = codec;
          const Outcome outcome = run(context, request);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          for (size_t i = 0; i < gradients.size(); i += apart)
            ASSERT_EQ(gradients[i], sum_of(i * 7 + static_cast<size_t>(step), ranks.size));
        }
        perseus_context_stats(context, &after);
        if (rank == 0) buckets = after.buckets - before.buckets;
      },
      options);
  EXPECT_EQ(buckets % static_cast<uint64_t>(counted), 0U);
  return buckets / static_cast<uint64_t>(counted);
}

TEST(TunedWorld, FusionMakesSoManyBuckets) {
  for (const Medium& medium : {all_media()[0], all_media()[2]}) {
    for (const perseus_codec codec : {PERSEUS_CODEC_EXACT, PERSEUS_CODEC_FLOAT16}) {
      SCOPED_TRACE(std::string(medium.name) + " codec " + std::to_string(codec));
      const bool one_run = codec == PERSEUS_CODEC_EXACT && std::string(medium.name) == "mem";
      EXPECT_EQ(buckets_of_a_step(medium, codec, {}), one_run ? 1U : codec == PERSEUS_CODEC_EXACT ? 2U : 3U);
      for (const uint64_t parts : {1U, 2U, 12U})
        EXPECT_EQ(buckets_of_a_step(medium, codec, {"PERSEUS_ALLREDUCE_FUSION=" + std::to_string(parts)}), parts);
      EXPECT_EQ(buckets_of_a_step(medium, codec, {"PERSEUS_ALLREDUCE_FUSION=1", "HOROVOD_FUSION_THRESHOLD=1048576"}),
                6U);
    }
  }
}

// A rank without a part in the exchange between hosts must not seem to hang meanwhile.
TEST(TunedWorld, FusionKeepsTensorsInStagesApart) {
  constexpr int64_t kCount = 3 << 18;  // 24 tensors of 3 MiB, in pieces of 4 MiB at most: float16 fills them
  for (const auto& [codec, buckets] : {std::pair(PERSEUS_CODEC_EXACT, 24U), std::pair(PERSEUS_CODEC_FLOAT16, 18U)})
    EXPECT_EQ(buckets_of_a_step(all_media()[0], codec, {"PERSEUS_ALLREDUCE_FUSION=1"}, kCount, {3, 2}), buckets);
}

// Zeros of a rank that has joined are part of the sum, and its tuner goes along.
TEST(TunedWorld, WhoHasJoinedSettlesWithTheOthers) {
  const std::string log = temporary("joined.csv");
  WorldOptions options;
  options.overrides = {"HOROVOD_AUTOTUNE=1", "HOROVOD_AUTOTUNE_LOG=" + log};
  run_world(
      all_media()[0], 3,
      [&](int rank, perseus_context* context) {
        const int64_t count = kElements;
        std::vector<float> gradient(kElements);
        const perseus_tensor floats{gradient.data(), gradient.data(), &count, 1, PERSEUS_FLOAT32};
        const auto steps = [&](int number, bool all) {
          for (int step = 0; step < number; ++step) {
            for (size_t i = 0; i < kElements; ++i) gradient[i] = static_cast<float>((i + 1) % 1000 << rank);
            perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", &floats, 1);
            request.gradient_of = 1;
            const Outcome outcome = run(context, request);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            for (size_t i = 0; i < kElements; ++i)
              ASSERT_TRUE(gradient[i] == static_cast<float>((i + 1) % 1000 * 7) ||
                          (!all && gradient[i] == static_cast<float>((i + 1) % 1000 * 5)))
                  << "element " << i;
          }
        };
        steps(rank == 1 ? 4 : 12, false);
        const Outcome joined = run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0));
        ASSERT_EQ(joined.code, PERSEUS_OK) << joined.message;
        steps(3, true);
      },
      options);
  EXPECT_GT(content(log).size(), perseus::tuner_log_header().size()) << "it has not settled";
  std::remove(log.c_str());
}

// Of which each rank has other rows in each step.
TEST(TunedWorld, SparseGradientsLeaveRanksWithOneChoice) {
  for (const char* parts : {"0", "4"}) {
    WorldOptions options;
    options.overrides = {"HOROVOD_AUTOTUNE=1", "GLOO_TIMEOUT_SECONDS=10",
                         std::string("PERSEUS_ALLREDUCE_FUSION=") + parts};
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          constexpr size_t kDense = 8;
          const int64_t count = 65536;
          std::vector<float> dense(kDense * static_cast<size_t>(count)), rows;
          for (int step = 0; step < 16; ++step) {
            std::vector<perseus_handle> handles(kDense + 1);
            for (size_t i = 0; i < dense.size(); ++i)
              dense[i] = static_cast<float>((i + static_cast<size_t>(step)) % 1000 << rank);
            for (size_t g = 0; g < kDense; ++g) {
              float* data = dense.data() + g * static_cast<size_t>(count);
              const perseus_tensor tensor{data, data, &count, 1, PERSEUS_FLOAT32};
              const std::string name = "d" + std::to_string(g);
              perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
              request.gradient_of = 1;
              ASSERT_EQ(submit(context, request, &handles[g]).code, PERSEUS_OK);
            }
            const int64_t mine = 64 + 1000 * rank * (step % 3);
            rows.assign(static_cast<size_t>(mine), static_cast<float>(10 * step + rank));
            const perseus_tensor sparse{rows.data(), nullptr, &mine, 1, PERSEUS_FLOAT32};
            perseus_request request = request_of(PERSEUS_ALLGATHER, "values", &sparse, 1);
            request.gradient_of = 1;
            ASSERT_EQ(submit(context, request, &handles[kDense]).code, PERSEUS_OK);
            for (const perseus_handle handle : handles) {
              const Outcome outcome = wait(context, handle);
              ASSERT_EQ(outcome.code, PERSEUS_OK) << "step " << step << ": " << outcome.message;
            }
            perseus_output all{};
            all.struct_size = sizeof all;
            ASSERT_EQ(perseus_handle_output(context, handles[kDense], 0, &all), PERSEUS_OK);
            ASSERT_EQ(all.size, static_cast<size_t>(128 + 1000 * (step % 3)) * sizeof(float));
            const float* gathered = static_cast<const float*>(all.data);
            for (size_t i = 0; i < all.size / sizeof(float); ++i)
              ASSERT_EQ(gathered[i], static_cast<float>(10 * step + (i < 64 ? 0 : 1))) << "row " << i;
            for (size_t i = 0; i < dense.size(); ++i)
              ASSERT_EQ(dense[i], static_cast<float>((i + static_cast<size_t>(step)) % 1000 * 3)) << "element " << i;
            for (const perseus_handle handle : handles) perseus_handle_release(context, handle);
          }
        },
        options);
  }
}

// A trial run or a search for the learning rate, say, whose gradients have other names.
TEST(TunedWorld, AnEarlierPhaseDoesNotKeepTheTrainingFromASchedule) {
  for (const int earlier : {1, 2, 6}) {
    SCOPED_TRACE(earlier);
    WorldOptions options;
    options.overrides = {"HOROVOD_AUTOTUNE=1", "PERSEUS_OFFLINE_NEG=1"};
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          const int64_t count = 1024;
          std::vector<float> gradients(4 * static_cast<size_t>(count));
          const auto steps = [&](int number, const std::string& phase) {
            for (int step = 0; step < number; ++step) {
              for (size_t i = 0; i < gradients.size(); ++i)
                gradients[i] = static_cast<float>((i + static_cast<size_t>(step)) << rank);
              perseus_handle handles[4];
              for (size_t g = 0; g < 4; ++g) {
                float* data = gradients.data() + g * static_cast<size_t>(count);
                const perseus_tensor tensor{data, data, &count, 1, PERSEUS_FLOAT32};
                const std::string name = phase + std::to_string(g);
                perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
                request.gradient_of = 1;
                ASSERT_EQ(submit(context, request, &handles[g]).code, PERSEUS_OK);
              }
              for (const perseus_handle handle : handles) {
                const Outcome outcome = wait(context, handle);
                ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
                perseus_handle_release(context, handle);
              }
              for (size_t i = 0; i < gradients.size(); ++i)
                ASSERT_EQ(gradients[i], static_cast<float>((i + static_cast<size_t>(step)) * 3)) << "element " << i;
            }
          };
          steps(earlier, "earlier");
          steps(40, "training");
          const uint64_t before = stats_of(context).rounds;
          steps(20, "training");
          EXPECT_LT(stats_of(context).rounds - before, 5U);
        },
        options);
  }
}

TEST(TunedWorld, AReplayedChoiceIsUsedFromTheStart) {
  const std::string log = temporary("replayed.csv"), again = temporary("again.csv");
  std::ofstream(log) << perseus::tuner_log_header()
                     << "3,134217728,4,0,0.500000,10.000,0\n4,1000000,2,30,0.250000,20.000,1\n";
  train(all_media()[0], 2, PERSEUS_CODEC_EXACT, {"PERSEUS_TUNER_REPLAY=" + log, "HOROVOD_AUTOTUNE_LOG=" + again});
  EXPECT_EQ(content(again), perseus::tuner_log_header() + "0,1000000,2,30,0.000000,0.000,1\n");
  std::remove(log.c_str());
  std::remove(again.c_str());
}

TEST(TunedWorld, AFileThatCannotBeReplayedIsOneClearError) {
  const std::string path = temporary("wrong.csv");
  const std::string header = perseus::tuner_log_header();
  const std::pair<std::string, std::string> wrong[] = {
      {"", "does not begin with 'step,bucket_bytes"},
      {header, "no line is chosen"},
      {header + "1,2,3\n", "line 2 '1,2,3': expected seven numbers"},
      {header + "1,2,13,0,0.5,1,1\n",
       "line 2 '1,2,13,0,0.5,1,1': expected at most 1099511627776 bytes, 1..12 streams and 0..100 percent"},
      {header + "1,2,3,101,0.5,1,1\n", "and 0..100 percent"},
      {header + "1,2,3,0,0.5,1,1\n2,2,3,50,0.5,1,1\n", "line 3 '2,2,3,50,0.5,1,1': an earlier line has another choice"},
  };
  const auto message = [&] {
    perseus_context* context = nullptr;
    EXPECT_EQ(create_context(all_media()[0], unique_name(), 0, 1, 0, {"PERSEUS_TUNER_REPLAY=" + path}, &context),
              PERSEUS_INVALID_ARGUMENT);
    return std::string(perseus_error_message());
  };
  EXPECT_NE(message().find("PERSEUS_TUNER_REPLAY='" + path + "': No such file"), std::string::npos) << message();
  for (const auto& [text, expected] : wrong) {
    std::ofstream(path) << text;
    EXPECT_NE(message().find(expected), std::string::npos) << message();
  }
  std::remove(path.c_str());
}

// Rank 0 would empty it before others have read it.
TEST(TunedWorld, AFileThatIsReplayedIsNotWrittenToo) {
  const std::string path = temporary("both.csv"), link = temporary("link.csv");
  const std::string chosen = perseus::tuner_log_header() + "3,1000000,2,30,0.500000,10.000,1\n";
  std::ofstream(path) << chosen;
  ASSERT_EQ(symlink(path.c_str(), link.c_str()), 0);
  for (const std::string& written : {path, link}) {
    perseus_context* context = nullptr;
    EXPECT_EQ(create_context(all_media()[0], unique_name(), 0, 1, 0,
                             {"PERSEUS_TUNER_REPLAY=" + path, "HOROVOD_AUTOTUNE_LOG=" + written}, &context),
              PERSEUS_INVALID_ARGUMENT);
    const std::string message = perseus_error_message();
    EXPECT_NE(message.find("PERSEUS_TUNER_REPLAY='" + path + "' is also HOROVOD_AUTOTUNE_LOG"), std::string::npos)
        << message;
    EXPECT_EQ(content(path), chosen);
  }
  std::remove(link.c_str());
  std::remove(path.c_str());
}

}  // namespace

// The tuner by itself: what it tries in the steps that it is shown, and on what it settles.
#include "execution/tuner.h"

#include <algorithm>
#include <functional>

#include "base/clock.h"
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

}  // namespace

// Offline negotiation: steps that repeat themselves send nothing but data, and whatever deviates from them, on
// whichever ranks, ends with the results that rounds would have given.
#include "control/schedule.h"

#include <cstring>
#include <memory>

#include "control/negotiation.h"
#include "operation.h"

namespace {

using namespace perseus_test;

constexpr int kTensors = 10;
constexpr int64_t kCounts[kTensors] = {1, 30000, 100, 5000, 3, 110000, 17, 2048, 9000, 512};
constexpr int kLearn = 8, kRelearn = 12;  // steps within which a schedule is frozen; again, after it broke once

// What some ranks give in a step, added up. ThreadSanitizer sees the memory that ranks share when this is copied there
// or compared with it, at once and not element by element.
using Numbers = std::unique_ptr<int64_t[]>;
__attribute__((no_sanitize("thread"))) Numbers sums_of(const std::vector<int>& ranks, int step, size_t count) {
  Numbers sums(new int64_t[count]);
  int64_t given = 0;
  const int64_t all = static_cast<int64_t>(ranks.size());
  for (const int rank : ranks) given += (rank + 1) * 1000 + step * 7;
  int64_t* const all_sums = sums.get();
  for (size_t i = 0; i < count; ++i) all_sums[i] = given - all * static_cast<int64_t>(i % 991);
  return sums;
}

// One rank's named tensors of int64: sums are checked element by element.
class Rank {
 public:
  Rank(perseus_context* context, int rank, int size, Barrier* barrier)
      : context_(context), rank_(rank), size_(size), barrier_(barrier), parts_(kTensors + 1) {}

  // `more`: elements beyond the usual number.
  void submit(int t, int step, int64_t more = 0) {
    Part& part = parts_[static_cast<size_t>(t)];
    part.step = step;
    part.shape = (t < kTensors ? kCounts[t] : 33) + more;
    part.memory.resize(static_cast<size_t>(part.shape));
    const Numbers mine = sums_of({rank_}, step, part.memory.size());
    std::memcpy(part.memory.data(), mine.get(), part.memory.size() * sizeof(int64_t));
    const perseus_tensor tensor{part.memory.data(), part.memory.data(), &part.shape, 1, PERSEUS_INT64};
    const std::string name = t < kTensors ? "t" + std::to_string(t) : "metric";
    const Outcome outcome =
        perseus_test::submit(context_, request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1), &part.handle);
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  }
  Outcome wait(int t) {
    Part& part = parts_[static_cast<size_t>(t)];
    const Outcome outcome = perseus_test::wait(context_, part.handle);
    EXPECT_NE(outcome.code, PERSEUS_IN_PROGRESS) << "rank " << rank_ << " tensor " << t << " step " << part.step;
    perseus_handle_release(context_, part.handle);
    return outcome;
  }
  // `from`: the ranks that gave values; empty = all.
  void finish(int t, std::vector<int> from = {}) {
    const Outcome outcome = wait(t);
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    const Part& part = parts_[static_cast<size_t>(t)];
    if (from.empty()) from = ranks_up_to(size_);
    const size_t count = part.memory.size();
    const Numbers sums = sums_of(from, part.step, count);
    if (std::memcmp(sums.get(), part.memory.data(), count * sizeof(int64_t)) == 0) return;
    const int64_t* const wrong = std::mismatch(sums.get(), sums.get() + count, part.memory.begin()).first;
    FAIL() << "tensor " << t << " step " << part.step << " at " << wrong - sums.get();
  }
  // One after the other, so that each is a batch of its own; or all at once.
  void step(int step, bool at_once = false, const std::vector<int>& from = {}) {
    for (int t = 0; t < kTensors; ++t) {
      submit(t, step);
      if (!at_once) finish(t, from);
    }
    for (int t = 0; t < kTensors && at_once; ++t) finish(t, from);
  }
  void steps(int first, int count) {
    for (int i = 0; i < count && !testing::Test::HasFatalFailure(); ++i) step(first + i);
  }
  uint64_t messages() { return messages_at_rest(context_, barrier_); }
  void expect_silence(int first_step) {
    const uint64_t before = messages();
    steps(first_step, 3);
    EXPECT_EQ(messages(), before) << "messages of rank " << rank_;
  }

 private:
  struct Part {
    std::vector<int64_t> memory;
    int64_t shape = 0;
    int step = 0;
    perseus_handle handle = 0;
  };
  perseus_context* context_;
  const int rank_, size_;
  Barrier* barrier_;
  std::vector<Part> parts_;
};

constexpr int kGrow = 4;       // steps within which a name that begins to come once the order is frozen ends it
constexpr int kMuch = 50'000;  // elements of such a name

class Scheduled : public testing::TestWithParam<int> {
 protected:
  // Every rank has learnt a schedule when `body` begins.
  void run_ranks(int size, const std::function<void(int, Rank*, perseus_context*)>& body) {
    WorldOptions options;
    options.overrides = {"PERSEUS_OFFLINE_NEG=1", "PERSEUS_ALLREDUCE_STREAMS=4"};
    Barrier barrier(size);
    run_world(
        all_media()[static_cast<size_t>(GetParam())], size,
        [&](int rank, perseus_context* context) {
          Rank mine(context, rank, size, &barrier);
          mine.steps(0, kLearn);
          body(rank, &mine, context);
          // A rank that gave up early is waited for all the same.
          barrier.wait();
        },
        options);
  }
};

TEST_P(Scheduled, RepeatedStepsSendNothingButData) {
  for (int size : {2, 3})
    run_ranks(size, [](int, Rank* rank, perseus_context*) {
      rank->expect_silence(100);
      // In another order than it was learnt, too: nobody waits for one before all are there.
      const uint64_t before = rank->messages();
      for (int step = 200; step < 203; ++step) rank->step(step, true);
      EXPECT_EQ(rank->messages(), before);
    });
}

TEST_P(Scheduled, WhatComesOnceInAWhileDoesNotBreakIt) {
  run_ranks(3, [](int number, Rank* rank, perseus_context*) {
    for (int step = 100; step < 103; ++step) {
      if (number == 0) rank->submit(kTensors, step);
      for (int t = 0; t < kTensors; ++t) rank->submit(t, step);
      if (number != 0) rank->submit(kTensors, step);
      if (number != 1) rank->finish(kTensors);
      for (int t = 0; t < kTensors; ++t) rank->finish(t);
      if (number == 1) rank->finish(kTensors);
    }
    rank->expect_silence(200);
  });
}

TEST_P(Scheduled, WhatComesInEveryStepFromNowOnIsLearntTooOrInstead) {
  for (const bool instead : {false, true})
    run_ranks(3, [instead](int, Rank* rank, perseus_context*) {
      const auto steps = [&](int first, int count) {
        for (int step = first; step < first + count && !testing::Test::HasFatalFailure(); ++step) {
          if (!instead) rank->step(step);
          rank->submit(kTensors, step, kMuch);
          rank->finish(kTensors);
        }
      };
      steps(100, kGrow + 1 + kRelearn);
      const uint64_t before = rank->messages();
      steps(200, 3);
      EXPECT_EQ(rank->messages(), before);
    });
}

// Ranks 1 and 2 lack one tensor each, so they have begun 3 and 7 of the 10 batches that the others have begun on four
// streams, and wait for the last one.
TEST_P(Scheduled, TwoRanksBreakAtDifferentBuckets) {
  run_ranks(4, [](int number, Rank* rank, perseus_context*) {
    const int missing = number == 1 ? 3 : number == 2 ? 7 : -1;
    for (int step = 100; step < 102; ++step) {
      for (int t = 0; t < kTensors; ++t)
        if (t != missing) rank->submit(t, step);
      rank->finish(kTensors - 1);
      if (missing >= 0) rank->submit(missing, step);
      for (int t = 0; t < kTensors - 1; ++t) rank->finish(t);
    }
    rank->steps(200, kRelearn);
    rank->expect_silence(300);
  });
}

TEST_P(Scheduled, AChangedShapeBreaksIt) {
  run_ranks(3, [](int number, Rank* rank, perseus_context*) {
    for (int t = 0; t < kTensors; ++t) rank->submit(t, 100, t == 5 ? 1000 : 0);
    for (int t = 0; t < kTensors; ++t) rank->finish(t);
    rank->steps(200, kRelearn);
    // On one rank alone it is an error on all; what else is under way goes on.
    for (int t = 0; t < kTensors; ++t) rank->submit(t, 300, t == 1 && number == 2 ? 5 : 0);
    const Outcome outcome = rank->wait(1);
    EXPECT_EQ(outcome.code, PERSEUS_MISMATCH);
    EXPECT_NE(outcome.message.find("shape"), std::string::npos) << outcome.message;
    for (int t = 0; t < kTensors; ++t)
      if (t != 1) rank->finish(t);
    rank->steps(400, 2);
  });
}

TEST_P(Scheduled, ARankThatHasJoinedGivesZeros) {
  run_ranks(3, [](int number, Rank* rank, perseus_context* context) {
    if (number != 1)
      for (int step = 100; step < 103; ++step) rank->step(step, step == 101, {0, 2});
    EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
    rank->steps(200, kRelearn);
    rank->expect_silence(300);
  });
}

TEST_P(Scheduled, ARankThatLeavesEndsWhatOthersHaveBegun) {
  run_ranks(3, [](int number, Rank*, perseus_context* context) {
    if (number == 1) return perseus_context_shutdown(context);
    for (int t = 0; t < kTensors; ++t) {
      perseus_handle handle = 0;
      int64_t memory = 1, shape = 1;
      const perseus_tensor tensor{&memory, &memory, &shape, 1, PERSEUS_INT64};
      const std::string name = "t" + std::to_string(t);
      Outcome outcome = submit(context, request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1), &handle);
      if (outcome.code == PERSEUS_OK) outcome = wait(context, handle);
      EXPECT_EQ(outcome.code, PERSEUS_ABORTED) << outcome.message;
      EXPECT_NE(outcome.message.find("rank 1 called shutdown()"), std::string::npos) << outcome.message;
    }
  });
}

// Two gradients whose codec is chosen by measurements.
class LearnsAutomatic {
 public:
  LearnsAutomatic() {
    for (int i = 0; i < 2; ++i) {
      perseus::Description d;
      d.tensors.push_back({perseus::DType::kFloat32, {8}});
      d.compression.automatic = true;
      names_[i].text = std::to_string(i);
      names_[i].slot = i;
      names_[i].agreed = entries_[i].description = d;
      entries_[i].name = &names_[i];
    }
  }
  // Returns how many steps it takes to freeze the order. `outdated`: in the first one, links are to be measured.
  int learn(int outdated = 0) {
    int steps = 0;
    for (; !schedule_.frozen() && steps < 100; ++steps) {
      entries_[1].description.outdated = steps == 0 ? outdated : 0;
      for (perseus::Entry& entry : entries_) schedule_.learn({&entry});
    }
    return steps;
  }
  void break_soon() { schedule_.thaw(10); }

 private:
  perseus::Name names_[2];
  perseus::Entry entries_[2];
  perseus::Schedule schedule_;
};

TEST(ScheduleOfAutomaticCodecs, MeasuringLinksAgainDoesNotPutTheNextOneOff) {
  LearnsAutomatic ranks;
  const int first = ranks.learn();
  for (int number = 1; number < 5; ++number) {
    ranks.break_soon();
    EXPECT_EQ(ranks.learn(number), first);
  }
  ranks.break_soon();
  const int later = ranks.learn();
  EXPECT_GT(later, first);
  ranks.break_soon();
  EXPECT_EQ(ranks.learn(5), later);
  ranks.break_soon();
  EXPECT_GT(ranks.learn(), later);
}

// A gradient that is scheduled, and something that comes beside it.
class LearnsBeside {
 public:
  explicit LearnsBeside(int64_t elements, int64_t elements_beside) {
    for (int i = 0; i < 2; ++i) {
      perseus::Description d;
      d.tensors.push_back({perseus::DType::kFloat32, {i == 0 ? elements : elements_beside}});
      names_[i].text = std::to_string(i);
      names_[i].slot = i;
      names_[i].agreed = entries_[i].description = d;
      entries_[i].name = &names_[i];
    }
    freeze();
  }
  // After how many times does what comes beside it end the schedule? At most 1000.
  int ends_after() {
    for (int times = 1; times < 1000; ++times) {
      if (!schedule_.outgrown({&entries_[1]})) continue;
      schedule_.thaw(1000);
      freeze();
      return times;
    }
    return 1000;
  }

 private:
  void freeze() {
    while (!schedule_.frozen()) schedule_.learn({&entries_[0]});
  }

  perseus::Name names_[2];
  perseus::Entry entries_[2];
  perseus::Schedule schedule_;
};

TEST(ScheduleThatIsOutgrown, IsByWhatIsMuchButLaterEachTime) {
  for (const int64_t beside : {1, 8, 1000}) {
    LearnsBeside ranks(8, beside);
    for (const int times : {4, 7, 13, 25, 49}) EXPECT_EQ(ranks.ends_after(), times) << beside;
  }
}

TEST(ScheduleThatIsOutgrown, IsNotByWhatIsLittle) {
  EXPECT_EQ(LearnsBeside(9, 1).ends_after(), 1000);
  EXPECT_EQ(LearnsBeside(1'000'000, 1000).ends_after(), 1000);
}

INSTANTIATE_TEST_SUITE_P(Media, Scheduled, each_medium(), medium_name);

// Steps in the order of their names, until a schedule is frozen and kept for a while, then one in which every rank does
// something else, in an order of its own: it brings some tensors only after it has waited for others, one is left out
// by all, and one is larger than before.
TEST(ScheduledAtRandom, WhateverDeviatesHasItsSums) {
  constexpr int kSize = 4;
  const int worlds = full_grid() ? 60 : kThreadSanitizer ? 1 : 3;
  for (int world = 0; world < worlds; ++world) {
    WorldOptions options;
    options.overrides = {"PERSEUS_OFFLINE_NEG=1", "PERSEUS_ALLREDUCE_STREAMS=" + std::to_string(1 + world % 4)};
    Barrier barrier(kSize);
    run_world(
        all_media()[static_cast<size_t>(world % 3)], kSize,
        [&](int number, perseus_context* context) {
          Rank rank(context, number, kSize, &barrier);
          std::mt19937 own(static_cast<unsigned>(world * 100 + number)), common(static_cast<unsigned>(world));
          int step = 0;
          for (int needed : {3, 6, 12}) {
            for (int i = 0; i < needed + 3; ++i) rank.step(step++, world % 2 == 1);
            const int none = static_cast<int>(common() % 20), larger = static_cast<int>(common() % 20);
            std::vector<int> first, awaited, late;
            for (int t = 0; t < kTensors; ++t) {
              if (t == none) continue;
              // Only what no rank brings late is waited for by one that is late itself, or they would wait for each
              // other.
              const bool may_be_late = common() % 2 == 0;
              if (!may_be_late) awaited.push_back(t);
              (may_be_late && own() % 2 == 0 ? late : first).push_back(t);
            }
            std::shuffle(first.begin(), first.end(), own);
            std::shuffle(awaited.begin(), awaited.end(), own);
            const auto submit = [&](int t) { rank.submit(t, step, t == larger ? 700 : 0); };
            std::for_each(first.begin(), first.end(), submit);
            awaited.resize(own() % (awaited.size() + 1));
            for (int t : awaited) rank.finish(t);
            std::for_each(late.begin(), late.end(), submit);
            for (const std::vector<int>* some : {&first, &late})
              for (int t : *some)
                if (std::find(awaited.begin(), awaited.end(), t) == awaited.end()) rank.finish(t);
            ++step;
            if (testing::Test::HasFatalFailure()) return;
          }
          rank.steps(step, 2);
        },
        options);
  }
}

// ---- gradients, through stages and codecs ----

__attribute__((no_sanitize("thread"))) std::vector<float> gradient(int rank, int step, int64_t size) {
  std::vector<float> values(static_cast<size_t>(size));
  float* const all = values.data();
  for (int64_t i = 0; i < size; ++i) all[i] = static_cast<float>((i * 31 + rank * 17 + step * 7) % 1009 - 504) / 64.0F;
  return values;
}

// As bfloat16, in the first half of their memory.
__attribute__((no_sanitize("thread"))) void make_narrow(std::vector<float>* values) {
  auto* const halves = reinterpret_cast<unsigned char*>(values->data());
  for (size_t i = 0; i < values->size(); ++i) std::memcpy(halves + 2 * i, halves + 4 * i + 2, 2);
}

// What every rank gets in every step, in one world after the other. `wide`: float32, else bfloat16, and so large that a
// gradient takes several turns of all streams.
using Bits = std::vector<std::vector<float>>;
Bits train(const std::vector<std::string>& settings, perseus_codec codec, bool wide, bool offline) {
  constexpr int kSize = 4, kSteps = 12, kGradients = 4;
  const int64_t kSizes[kGradients] = {40000, wide ? 300 : 3 << 20, 20000, 70000};
  WorldOptions options;
  options.overrides = settings;
  options.overrides.push_back(std::string("PERSEUS_OFFLINE_NEG=") + (offline ? "1" : "0"));
  Bits bits(kSize);
  run_world(
      all_media()[0], kSize,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < kSteps; ++step) {
          std::vector<std::vector<float>> memory;
          perseus_handle handles[kGradients];
          const auto submit_one = [&](int i, int64_t fewer) {
            const int64_t count = kSizes[i] - fewer;
            const perseus_tensor tensor{memory[static_cast<size_t>(i)].data(), memory[static_cast<size_t>(i)].data(),
                                        &count, 1, wide ? PERSEUS_FLOAT32 : PERSEUS_BFLOAT16};
            const std::string name = "gradient" + std::to_string(i);
            perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
            request.op = PERSEUS_AVERAGE;
            request.gradient_of = 1;
            request.codec = codec;
            request.codec_argument = codec == PERSEUS_CODEC_ROTATE ? 4 : 0;
            const Outcome outcome = submit(context, request, &handles[i]);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          };
          for (int64_t size : kSizes) {
            memory.push_back(gradient(rank, step, size));
            if (!wide) make_narrow(&memory.back());
          }
          // Once, two ranks leave what the others have begun: their second gradient comes after a wait for the last,
          // and is another one. That is an error on all ranks, and nothing of it stays.
          const bool late = step == 8 && rank % 2 == 1;
          for (int i = 0; i < kGradients; ++i)
            if (!late || i != 1) submit_one(i, 0);
          if (late) {
            EXPECT_EQ(wait(context, handles[kGradients - 1]).code, PERSEUS_OK);
            submit_one(1, 1);
          }
          for (int i = 0; i < kGradients; ++i) {
            const Outcome outcome = wait(context, handles[i]);
            EXPECT_EQ(outcome.code, step == 8 && i == 1 ? PERSEUS_MISMATCH : PERSEUS_OK) << outcome.message;
            perseus_handle_release(context, handles[i]);
            if (outcome.code != PERSEUS_OK) continue;
            std::vector<float>& all = bits[static_cast<size_t>(rank)];
            const std::vector<float>& result = memory[static_cast<size_t>(i)];
            all.insert(all.end(), result.begin(), result.begin() + result.size() / (wide ? 1 : 2));
          }
        }
      },
      options);
  return bits;
}

TEST(ScheduledGradients, HaveTheBitsOfOnlineNegotiation) {
  const std::vector<std::string> staged = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=2"};
  struct Case {
    std::vector<std::string> settings;
    perseus_codec codec;
    bool wide = true;
  };
  const std::vector<std::string> in_steps = {"PERSEUS_ALLREDUCE_ALGORITHM=halving_doubling"};
  for (const Case& c : {Case{{}, PERSEUS_CODEC_EXACT}, Case{in_steps, PERSEUS_CODEC_EXACT},
                        Case{staged, PERSEUS_CODEC_EXACT}, Case{staged, PERSEUS_CODEC_INT8},
                        Case{staged, PERSEUS_CODEC_ROTATE}, Case{staged, PERSEUS_CODEC_INT8, false}}) {
    if (kThreadSanitizer && c.codec != PERSEUS_CODEC_ROTATE) continue;
    const Bits online = train(c.settings, c.codec, c.wide, false), offline = train(c.settings, c.codec, c.wide, true);
    EXPECT_TRUE(online[0] == online[1]) << "codec " << c.codec;
    EXPECT_TRUE(online == offline) << "codec " << c.codec;
  }
}

}  // namespace

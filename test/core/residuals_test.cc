// What lossy codecs hold back when something changes: it is sent once, bit for bit, or carried to another world.
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "operation.h"

namespace {

using namespace perseus_test;
using Floats = std::vector<float>;

struct Codec {
  perseus_codec codec;
  double argument;
};
constexpr Codec kExact{PERSEUS_CODEC_EXACT, 0}, kHalf{PERSEUS_CODEC_FLOAT16, 0}, kInt8{PERSEUS_CODEC_INT8, 0},
    kTopK{PERSEUS_CODEC_TOP_K, 0.01}, kRotate{PERSEUS_CODEC_ROTATE, 4}, kAuto{PERSEUS_CODEC_AUTO, 0};

constexpr int kRanks = 4;
constexpr size_t kCount = 40001;  // three chunks, so ranks own different numbers of them

// Whole numbers, so that sums of them, and means of four, have no rounding: what is missing has been lost.
Floats gradient(int step, int rank) {
  Floats x(kCount);
  for (size_t i = 0; i < kCount; ++i)
    x[i] = static_cast<float>(mix(mix(static_cast<uint64_t>(step * 31 + rank)) + i) % 2001) - 1000.0F;
  return x;
}

WorldOptions in_groups_of(int ranks) {
  WorldOptions options;
  options.overrides = {"LIGHT_TOPK_THRESHOLD=0", "LIGHT_TOPK_WARMUP_STEPS=0"};
  if (ranks > 0)
    options.overrides.insert(options.overrides.end(),
                             {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=" + std::to_string(ranks)});
  return options;
}

// Two tensors in one request.
Floats reduce(perseus_context* context, Floats x, const Codec& codec) {
  const int64_t counts[] = {1000, static_cast<int64_t>(x.size()) - 1000};
  const perseus_tensor tensors[] = {{x.data(), x.data(), &counts[0], 1, PERSEUS_FLOAT32},
                                    {x.data() + 1000, x.data() + 1000, &counts[1], 1, PERSEUS_FLOAT32}};
  perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", tensors, 2);
  request.op = PERSEUS_AVERAGE;
  request.gradient_of = 1;
  request.codec = codec.codec;
  request.codec_argument = codec.argument;
  const Outcome outcome = run(context, request);
  EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  return x;
}

struct Held {
  Floats data;  // what is sent next, then what is owned
  uint64_t layout = 0, shapes = 0;
  float sent(size_t i) const { return data.empty() ? 0.0F : data[i]; }
  float owned(size_t i) const { return data.empty() ? 0.0F : data[kCount + i]; }
};

perseus_residual residual_of(Held* held) {
  perseus_residual residual{};
  residual.struct_size = sizeof residual;
  residual.gradient_of = 1;
  residual.name = "g";
  residual.data = held->data.empty() ? nullptr : held->data.data();
  residual.count = held->data.size();
  residual.layout = held->layout;
  residual.shapes = held->shapes;
  return residual;
}

Held held_by(perseus_context* context) {
  Held held;
  for (int pass = 0; pass < 2; ++pass) {
    perseus_residual residual = residual_of(&held);
    EXPECT_EQ(perseus_residual_read(context, &residual), PERSEUS_OK) << perseus_error_message();
    held.layout = residual.layout;
    held.shapes = residual.shapes;
    held.data.resize(residual.count);
  }
  return held;
}

void give(perseus_context* context, Held held) {
  const perseus_residual residual = residual_of(&held);
  EXPECT_EQ(perseus_residual_write(context, &residual), PERSEUS_OK) << perseus_error_message();
}

// A run of `steps` on every rank, as far as the ranks have got.
struct Training {
  std::vector<Held> held = std::vector<Held>(kRanks);
  std::vector<Floats> results;  // of each step, on rank 0
};

void take_steps(Training* training, int rank, perseus_context* context, int from, int to, const Codec& codec) {
  for (int step = from; step < to; ++step) {
    const Floats result = reduce(context, gradient(step, rank), codec);
    if (rank == 0) training->results.push_back(result);
  }
  training->held[rank] = held_by(context);
}

// The means of all that the ranks have produced in steps 0 … steps, against what has arrived.
void expect_nothing_missing(const Training& training, int steps) {
  ASSERT_EQ(training.results.size(), static_cast<size_t>(steps));
  Floats missing(kCount);
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const Floats x = gradient(step, rank);
      for (size_t i = 0; i < kCount; ++i) missing[i] += x[i] / kRanks;
    }
    for (size_t i = 0; i < kCount; ++i) missing[i] -= training.results[static_cast<size_t>(step)][i];
  }
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(missing[i], 0.0F) << "element " << i;
}

// What the step after `before` gives when all that is held goes along: in the order in which the ranks add.
Floats whole_step(const Training& before, int step, int inner) {
  std::vector<Floats> gradients;
  for (int rank = 0; rank < kRanks; ++rank) gradients.push_back(gradient(step, rank));
  Floats expected(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    float sum = 0, owned = 0;
    for (int first = 0; first < kRanks; first += inner) {
      float group = 0, held = 0;  // one of a group sends the element
      for (int rank = first; rank < first + inner; ++rank) {
        group += gradients[static_cast<size_t>(rank)][i];
        held += before.held[static_cast<size_t>(rank)].sent(i);
        owned += before.held[static_cast<size_t>(rank)].owned(i);
      }
      sum += group + held;
    }
    expected[i] = sum * (1.0F / kRanks) + owned;
  }
  return expected;
}

class Change : public testing::TestWithParam<int> {};

TEST_P(Change, OfTheCodecSendsAllThatIsHeld) {
  const int inner = GetParam();
  WorldOptions options = in_groups_of(inner);
  options.overrides.push_back("PERSEUS_LINK_GBIT=0.001");  // auto takes int8 on such links
  const std::pair<Codec, Codec> changes[] = {{kTopK, kExact},  {kTopK, kHalf},  {kInt8, kTopK},
                                             {kRotate, kInt8}, {kInt8, kExact}, {kTopK, {PERSEUS_CODEC_TOP_K, 0.02}},
                                             {kTopK, kAuto},   {kAuto, kExact}};
  for (const auto& [from, to] : changes) {
    SCOPED_TRACE(std::to_string(from.codec) + " to " + std::to_string(to.codec));
    Training before, after;
    run_world(
        all_media()[0], kRanks,
        [&](int rank, perseus_context* context) {
          take_steps(&before, rank, context, 0, 2, from);
          EXPECT_FALSE(before.held[rank].data.empty());
          take_steps(&after, rank, context, 2, 3, to);
          EXPECT_TRUE(after.held[rank].data.empty());
        },
        options);
    const Floats expected = whole_step(before, 2, inner);
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(after.results[0][i], expected[i]) << "element " << i;
    before.results.push_back(after.results[0]);
    if (from.codec == PERSEUS_CODEC_TOP_K || from.codec == PERSEUS_CODEC_ROTATE) expect_nothing_missing(before, 3);
  }
}

// Sums of what steps have given, whatever they multiply it by, are those of all gradients.
TEST_P(Change, OfAFactorMovesWhatIsHeldAsFarAsBefore) {
  const int inner = GetParam();
  struct Step {
    perseus_reduce_op op;
    double prescale, postscale;
  };
  constexpr Step kSteps[] = {{PERSEUS_AVERAGE, 1, 1},
                             {PERSEUS_SUM, 1, 1},
                             {PERSEUS_SUM, 2, 0.125},
                             {PERSEUS_AVERAGE, 0.5, 4},
                             {PERSEUS_SUM, 1, -1}};
  for (const Codec& last : {kTopK, kExact}) {
    std::vector<Floats> results;
    run_world(
        all_media()[0], kRanks,
        [&](int rank, perseus_context* context) {
          for (size_t step = 0; step < std::size(kSteps); ++step) {
            Floats x = gradient(static_cast<int>(step), rank);
            const int64_t count = kCount;
            const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
            perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", &tensor, 1);
            request.op = kSteps[step].op;
            request.prescale = kSteps[step].prescale;
            request.postscale = kSteps[step].postscale;
            request.gradient_of = 1;
            const Codec& codec = step + 1 < std::size(kSteps) ? kTopK : last;
            request.codec = codec.codec;
            request.codec_argument = codec.argument;
            if (step + 1 == std::size(kSteps)) perseus_residuals_flush(context);
            ASSERT_EQ(run(context, request).code, PERSEUS_OK) << perseus_error_message();
            if (rank == 0) results.push_back(x);
          }
          EXPECT_TRUE(held_by(context).data.empty());
        },
        in_groups_of(inner));
    Floats missing(kCount);
    for (size_t step = 0; step < std::size(kSteps); ++step) {
      const double divisor = kSteps[step].op == PERSEUS_AVERAGE ? kRanks : 1;
      const auto factor = static_cast<float>(kSteps[step].prescale * kSteps[step].postscale / divisor);
      for (int rank = 0; rank < kRanks; ++rank) {
        const Floats x = gradient(static_cast<int>(step), rank);
        for (size_t i = 0; i < kCount; ++i) missing[i] += factor * x[i];
      }
      for (size_t i = 0; i < kCount; ++i) missing[i] -= results[step][i];
    }
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(missing[i], 0.0F) << "element " << i;
  }
}

TEST_P(Change, AFlushOfOneRankFlushesAll) {
  for (const Codec& codec : {kTopK, kRotate, kInt8}) {
    Training before, flushed, after;
    run_world(
        all_media()[0], kRanks,
        [&](int rank, perseus_context* context) {
          take_steps(&before, rank, context, 0, 3, codec);
          if (rank == 1) {
            EXPECT_EQ(perseus_residuals_flush(context), PERSEUS_OK);
          }
          take_steps(&flushed, rank, context, 3, 4, codec);
          EXPECT_TRUE(flushed.held[rank].data.empty());
          take_steps(&after, rank, context, 4, 5, codec);
          EXPECT_FALSE(after.held[rank].data.empty()) << "once";
        },
        in_groups_of(GetParam()));
    const Floats expected = whole_step(before, 3, GetParam());
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(flushed.results[0][i], expected[i]) << "element " << i;
  }
}

TEST_P(Change, OfTheWorldCarriesWhatIsHeld) {
  // Together and in pairs, in hosts of one, and on one host, where nothing would be encoded.
  for (const int inner : {1, 2, 0}) {
    Training before, after, straight;
    const auto options = in_groups_of(GetParam());
    run_world(
        all_media()[0], kRanks,
        [&](int rank, perseus_context* context) { take_steps(&before, rank, context, 0, 2, kTopK); }, options);
    run_world(
        all_media()[0], kRanks,
        [&](int rank, perseus_context* context) {
          give(context, before.held[rank]);
          take_steps(&after, rank, context, 2, 3, kTopK);
        },
        in_groups_of(inner));
    if (inner == GetParam()) {
      run_world(
          all_media()[0], kRanks,
          [&](int rank, perseus_context* context) { take_steps(&straight, rank, context, 0, 3, kTopK); }, options);
      EXPECT_EQ(after.results[0], straight.results[2]) << "as if it had never been away";
      for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(after.held[rank].data, straight.held[rank].data);
    } else {
      for (const Held& held : after.held) EXPECT_TRUE(held.data.empty());
      before.results.push_back(after.results[0]);
      expect_nothing_missing(before, 3);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(InGroupsOf, Change, testing::Values(1, 2));

TEST(Residual, IsSentByARankAlone) {
  run_world(all_media()[0], 1, [](int, perseus_context* context) {
    Held held;
    held.data.assign(2 * kCount, 0.0F);
    held.data[3] = 5;           // held of a gradient
    held.data[kCount + 4] = 7;  // and of a result
    give(context, held);
    Floats expected = gradient(0, 0);
    expected[3] += 5;
    expected[4] += 7;
    EXPECT_EQ(reduce(context, gradient(0, 0), kTopK), expected);
    EXPECT_TRUE(held_by(context).data.empty());
  });
}

TEST(Residual, ThatWasLoadedIsSentByACodecThatKeepsNone) {
  for (const Codec& codec : {kExact, kHalf})
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          Held held;
          held.data.assign(2 * kCount, 0.0F);
          held.data[3] = static_cast<float>(4 * (rank + 1));
          if (rank == 0) held.data[kCount + 4] = 7;  // of a mean
          give(context, held);
          Floats expected = gradient(0, 0);
          const Floats other = gradient(0, 1);
          for (size_t i = 0; i < kCount; ++i) expected[i] = (expected[i] + other[i]) / 2;
          expected[3] += 6;
          expected[4] += 7;
          EXPECT_EQ(reduce(context, gradient(0, rank), codec), expected);
          EXPECT_TRUE(held_by(context).data.empty());
        },
        in_groups_of(1));
}

// Of a process's addresses, so that not even memory that nobody touches can be had.
class LittleMemory {
 public:
  explicit LittleMemory(size_t more) {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    getrlimit(RLIMIT_AS, &before_);
    const rlimit now{pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + more, before_.rlim_max};
    setrlimit(RLIMIT_AS, &now);
  }
  ~LittleMemory() { setrlimit(RLIMIT_AS, &before_); }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;

 private:
  rlimit before_{};
};

TEST(Residual, ThatGetsNoMemoryEndsAllThatWasReady) {
  if (kSanitizer) GTEST_SKIP() << "sanitizers have an address space of their own";
  WorldOptions options = in_groups_of(1);
  // So that both become ready in one round.
  options.overrides.insert(options.overrides.end(), {"HOROVOD_CYCLE_TIME=200", "PERSEUS_FLIGHT_RECORDER="});
  Barrier barrier(2);
  std::unique_ptr<LittleMemory> little;
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Floats large(24 << 20), small(5000);
        perseus_handle handles[2];
        std::vector<std::pair<const char*, Floats*>> given{{"large", &large}, {"small", &small}};
        reduce(context, gradient(0, rank), kInt8);
        barrier.wait();
        if (rank == 0) little = std::make_unique<LittleMemory>(size_t{64} << 20);
        barrier.wait();
        for (size_t i = 0; i < 2; ++i) {
          const auto& [name, values] = given[i];
          const int64_t count = static_cast<int64_t>(values->size());
          const perseus_tensor tensor{values->data(), values->data(), &count, 1, PERSEUS_FLOAT32};
          perseus_request request = request_of(PERSEUS_ALLREDUCE, name, &tensor, 1);
          request.gradient_of = 1;
          request.codec = PERSEUS_CODEC_INT8;
          ASSERT_EQ(submit(context, request, &handles[i]).code, PERSEUS_OK);
        }
        for (const perseus_handle handle : handles) {
          const Outcome outcome = wait(context, handle);
          EXPECT_NE(outcome.code, PERSEUS_OK);
          EXPECT_NE(outcome.message.find("out of memory for what is held back of 'large'"), std::string::npos)
              << outcome.message;
        }
        barrier.wait();
        if (rank == 0) little.reset();
        barrier.wait();
      },
      options);
}

TEST(Residual, OfOtherSizesIsGivenUp) {
  run_world(
      all_media()[0], 2,
      [](int rank, perseus_context* context) {
        reduce(context, gradient(0, rank), kTopK);
        Floats shorter = gradient(1, rank);
        shorter.resize(5000);
        Floats mean(5000);
        const Floats x = gradient(1, 0), y = gradient(1, 1);
        for (size_t i = 0; i < mean.size(); ++i) mean[i] = (x[i] + y[i]) / 2;
        EXPECT_EQ(reduce(context, shorter, kExact), mean);
        EXPECT_TRUE(held_by(context).data.empty());
      },
      in_groups_of(1));
}

// As many elements, of which each lies elsewhere.
struct Form {
  Shape shape;
  std::vector<int> order;  // of dimensions in memory
};
const Form kTall{{250, 160}, {}}, kWide{{160, 250}, {}}, kTransposed{{250, 160}, {1, 0}};

Floats gradient_of_form(int step, int rank) {
  Floats x = gradient(step, rank);
  x.resize(250 * 160);
  return x;
}

template <class Value>
void reduce_as(const Form& form, perseus_dtype dtype, perseus_context* context, const Codec& codec,
               std::vector<Value>* x) {
  const perseus_tensor tensor{x->data(), x->data(), form.shape.data(), 2, dtype};
  perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", &tensor, 1);
  request.op = PERSEUS_AVERAGE;
  request.gradient_of = 1;
  request.ranks = form.order.data();
  request.rank_count = static_cast<int>(form.order.size());
  request.codec = codec.codec;
  request.codec_argument = codec.argument;
  const Outcome outcome = run(context, request);
  EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
}

Floats reduced_as(const Form& form, perseus_context* context, const Codec& codec, int step, int rank) {
  Floats x = gradient_of_form(step, rank);
  reduce_as(form, PERSEUS_FLOAT32, context, codec, &x);
  return x;
}

Floats mean_of_two(int step) {
  Floats mean = gradient_of_form(step, 0);
  const Floats other = gradient_of_form(step, 1);
  for (size_t i = 0; i < mean.size(); ++i) mean[i] = (mean[i] + other[i]) / 2;
  return mean;
}

TEST(Residual, OfAnotherShapeOrMemoryOrderIsGivenUp) {
  for (const Form& other : {kWide, kTransposed})
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          reduced_as(kTall, context, kTopK, 0, rank);
          EXPECT_FALSE(held_by(context).data.empty());
          EXPECT_EQ(reduced_as(other, context, kExact, 1, rank), mean_of_two(1));
          EXPECT_TRUE(held_by(context).data.empty());
        },
        in_groups_of(1));
}

TEST(Residual, ThatWasLoadedGoesToNoOtherShapeOrMemoryOrder) {
  for (const Form& other : {kTall, kWide, kTransposed})
    for (const bool known : {true, false}) {
      SCOPED_TRACE(testing::Message() << other.shape[0] << ' ' << other.order.size() << ' ' << known);
      std::vector<Held> held(2);
      run_world(
          all_media()[0], 2,
          [&](int rank, perseus_context* context) {
            reduced_as(kTall, context, kTopK, 0, rank);
            held[rank] = held_by(context);
            EXPECT_NE(held[rank].shapes, 0U);
            if (!known) held[rank].shapes = 0;
          },
          in_groups_of(1));
      Floats expected = mean_of_two(1);
      const size_t count = expected.size();
      const bool is_sent = !known || (other.shape == kTall.shape && other.order.empty());
      for (size_t i = 0; is_sent && i < count; ++i)
        expected[i] += (held[0].data[i] + held[1].data[i]) / 2 + held[0].data[count + i] + held[1].data[count + i];
      run_world(
          all_media()[0], 2,
          [&](int rank, perseus_context* context) {
            give(context, held[rank]);
            EXPECT_EQ(reduced_as(other, context, kExact, 1, rank), expected);
            EXPECT_TRUE(held_by(context).data.empty());
          },
          in_groups_of(1));
    }
}

// As bfloat16 the tensor is too small for the codec.
TEST(Residual, IsSentWhenTheTypeChanges) {
  WorldOptions options = in_groups_of(1);
  options.overrides[0] = "LIGHT_TOPK_THRESHOLD=100000";
  std::vector<Held> held(2);
  std::vector<uint16_t> result;
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 2; ++step) reduced_as(kTall, context, kTopK, step, rank);
        held[rank] = held_by(context);
        std::vector<uint16_t> x(250 * 160);
        reduce_as(kTall, PERSEUS_BFLOAT16, context, kTopK, &x);
        EXPECT_TRUE(held_by(context).data.empty());
        if (rank == 0) result = x;
      },
      options);
  const size_t count = result.size();
  for (size_t i = 0; i < count; ++i) {
    // And 0, so that there is no -0.
    const float expected =
        (held[0].data[i] + held[1].data[i]) / 2 + held[0].data[count + i] + held[1].data[count + i] + 0.0F;
    uint32_t bits;
    std::memcpy(&bits, &expected, sizeof bits);
    ASSERT_EQ(result[i], (bits + 0x7fffU + (bits >> 16 & 1)) >> 16) << i;
  }
}

TEST(Residual, AndStepsOutliveARequestThatRanksDisagreeAbout) {
  std::vector<Floats> results[2];  // without and with one
  for (bool trips : {false, true}) {
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          for (int step = 0; step < 3; ++step) {
            const Floats result = reduce(context, gradient(step, rank), kRotate);
            if (rank == 0) results[trips].push_back(result);
            if (step > 0 || !trips) continue;
            Floats x(rank == 0 ? kCount : 5000);
            const int64_t count = static_cast<int64_t>(x.size());
            const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
            perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", &tensor, 1);
            request.op = PERSEUS_AVERAGE;
            request.gradient_of = 1;
            request.codec = kRotate.codec;
            request.codec_argument = kRotate.argument;
            EXPECT_EQ(run(context, request).code, PERSEUS_MISMATCH);
          }
        },
        in_groups_of(1));
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(Residual, OfFloat64IsSentToo) {
  run_world(
      all_media()[0], 2,
      [](int rank, perseus_context* context) {
        std::vector<double> missing(kCount);
        const int64_t count = kCount;
        for (int step = 0; step < 3; ++step) {
          const Floats mine = gradient(step, rank), others = gradient(step, 1 - rank);
          std::vector<double> x(mine.begin(), mine.end());
          const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT64};
          perseus_request request = request_of(PERSEUS_ALLREDUCE, "d", &tensor, 1);
          const Codec& codec = step < 2 ? kTopK : kExact;
          request.codec = codec.codec;
          request.codec_argument = codec.argument;
          ASSERT_EQ(run(context, request).code, PERSEUS_OK) << perseus_error_message();
          for (size_t i = 0; i < kCount; ++i) missing[i] += static_cast<double>(mine[i]) + others[i] - x[i];
          EXPECT_EQ(missing == std::vector<double>(kCount), step == 2);
        }
      },
      in_groups_of(1));
}

TEST(Residual, OfARankThatHasJoinedWaits) {
  Training before, after;
  run_world(
      all_media()[0], kRanks,
      [&](int rank, perseus_context* context) {
        take_steps(&before, rank, context, 0, 1, kTopK);
        if (rank < 2) {
          EXPECT_EQ(perseus_residuals_flush(context), PERSEUS_OK);
        }
        if (rank != 1) take_steps(&after, rank, context, 1, 2, kTopK);
        EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
        after.held[rank] = held_by(context);
      },
      in_groups_of(1));
  EXPECT_EQ(after.held[1].data, before.held[1].data);
  for (int rank : {0, 2, 3}) EXPECT_TRUE(after.held[rank].data.empty());
}

// A rank that has joined keeps no residuals, but still sends sums of its host's ranks, and sums chunks for all.
TEST_P(Change, WhatPassesThroughAJoinedRankIsNotLost) {
  constexpr int kSteps = 5;
  for (const Codec& codec : {kTopK, kRotate, kInt8, Codec{PERSEUS_CODEC_INT2, 0}}) {
    Training training;
    run_world(
        all_media()[0], kRanks,
        [&](int rank, perseus_context* context) {
          if (rank != 1) {
            take_steps(&training, rank, context, 0, kSteps - 1, codec);
            EXPECT_EQ(perseus_residuals_flush(context), PERSEUS_OK);
            take_steps(&training, rank, context, kSteps - 1, kSteps, codec);
          }
          EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
        },
        in_groups_of(GetParam()));
    ASSERT_EQ(training.results.size(), static_cast<size_t>(kSteps));
    std::vector<double> missing(kCount);
    for (int step = 0; step < kSteps; ++step)
      for (size_t i = 0; i < kCount; ++i) missing[i] -= training.results[static_cast<size_t>(step)][i];
    for (const int rank : {0, 2, 3})
      for (int step = 0; step < kSteps; ++step) {
        const Floats x = gradient(step, rank);
        for (size_t i = 0; i < kCount; ++i) missing[i] += x[i] / kRanks;
      }
    for (size_t i = 0; i < kCount; ++i) ASSERT_NEAR(missing[i], 0.0, 0.01) << "codec " << codec.codec << ", " << i;
  }
}

// Ranks that took different numbers of steps send the same part in the first step after they have joined.
TEST_P(Change, TurnsBeginAnewAfterJoin) {
  constexpr size_t kBlock = 16, kChunk = 16 * 1024, kParts = 4;
  Training training;
  run_world(
      all_media()[0], kRanks,
      [&](int rank, perseus_context* context) {
        take_steps(&training, rank, context, 0, rank == 1 ? 2 : 3, kRotate);
        EXPECT_EQ(run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0)).code, PERSEUS_OK);
        take_steps(&training, rank, context, 3, 4, kRotate);
      },
      in_groups_of(GetParam()));
  const Floats& result = training.results.back();
  for (size_t i = 1000; i < kCount; ++i) {
    const size_t block = (i - 1000) % kChunk / kBlock;
    if ((block + 1) % kParts == 0) continue;
    ASSERT_EQ(result[i], 0.0F) << "element " << i;
  }
}

}  // namespace

// Gradients that travel encoded between inner groups: what comes out, on whom it depends, what is refused.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "operation.h"

namespace {

using namespace perseus_test;

struct Codec {
  const char* name;
  perseus_codec codec;
  double argument;
  double error;  // of one rounding, against the largest element of a chunk; 0 = elements may be missing
  bool holds_back;
};
constexpr Codec kCodecs[] = {{"float16", PERSEUS_CODEC_FLOAT16, 0, 0x1p-11, false},
                             {"bfloat16", PERSEUS_CODEC_BFLOAT16, 0, 0x1p-8, false},
                             {"int8", PERSEUS_CODEC_INT8, 0, 1.01 / 254, true},
                             {"topk", PERSEUS_CODEC_TOP_K, 0.1, 0, true},
                             {"rotate", PERSEUS_CODEC_ROTATE, 4, 0, true}};
// The same by variables, with PERSEUS_ALLREDUCE_DTYPE=0: float16 inside groups as well.
constexpr Codec kHalfInside[] = {{"float16", PERSEUS_CODEC_SETTINGS, 0, 1.5 * 0x1p-11, false},
                                 {"int8", PERSEUS_CODEC_SETTINGS, 0, 1.01 / 254 + 0x1p-12, true},
                                 {"topk", PERSEUS_CODEC_SETTINGS, 0, 0, true},
                                 {"rotate", PERSEUS_CODEC_SETTINGS, 0, 0, true}};

std::vector<std::string> variables_of(const std::string& codec) {
  if (codec == "int8") return {"PERSEUS_ALLREDUCE_CODEC=int8"};
  if (codec == "topk") return {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_RATIO=0.1", "LIGHT_TOPK_THRESHOLD=0"};
  if (codec == "rotate") return {"PERSEUS_DOWNSAMPLE_N_ELEMENTS=4"};
  return {};
}

std::vector<std::string> groups_of(int ranks) {
  return {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=" + std::to_string(ranks)};
}

using Floats = std::vector<float>;

// Between -1 and 1, as many small ones as large ones.
float noise(uint64_t seed, int rank, size_t i) {
  const uint64_t hash = mix(mix(seed * 31 + static_cast<uint64_t>(rank)) + i);
  const float x = static_cast<float>(hash >> 40) * 0x1p-23F - 1.0F;
  return x * x * x;
}

Floats gradient(uint64_t seed, int rank, size_t count) {
  Floats x(count);
  for (size_t i = 0; i < count; ++i) x[i] = noise(seed, rank, i);
  return x;
}

perseus_request gradient_request(const char* name, const perseus_tensor* tensor, const Codec& codec) {
  perseus_request request = request_of(PERSEUS_ALLREDUCE, name, tensor, 1);
  request.op = PERSEUS_AVERAGE;
  request.gradient_of = 1;
  request.codec = codec.codec;
  request.codec_argument = codec.argument;
  return request;
}

// The last one takes several slices.
constexpr size_t kSizes[] = {
    1, 13, 1000, 16384, 16385, 70001, kThreadSanitizer ? 200000 : kSanitizer ? 1100000 : 2500000};

// The gradients of every size, submitted together; what each rank got.
std::vector<std::vector<Floats>> reduce(const Medium& medium, int size, const Codec& codec,
                                        std::vector<std::string> settings, bool backwards, int steps = 1) {
  std::vector<std::vector<Floats>> results(static_cast<size_t>(size));
  WorldOptions options;
  options.overrides = std::move(settings);
  run_world(
      medium, size,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < steps; ++step) {
          std::vector<Floats>& mine = results[static_cast<size_t>(rank)];
          mine.clear();
          std::vector<perseus_handle> handles;
          std::deque<int64_t> counts;
          for (size_t count : kSizes) mine.push_back(gradient(count + static_cast<size_t>(step), rank, count));
          for (size_t n = 0; n < mine.size(); ++n) {
            const size_t i = backwards ? mine.size() - 1 - n : n;
            counts.push_back(static_cast<int64_t>(mine[i].size()));
            const perseus_tensor tensor{mine[i].data(), mine[i].data(), &counts.back(), 1, PERSEUS_FLOAT32};
            const std::string name = "g" + std::to_string(i);
            handles.emplace_back();
            const Outcome outcome = submit(context, gradient_request(name.c_str(), &tensor, codec), &handles.back());
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          }
          for (perseus_handle handle : handles) {
            const Outcome outcome = wait(context, handle);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            perseus_handle_release(context, handle);
          }
        }
      },
      options);
  return results;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Ranks that share memory, in groups of two, and ranks that do not.
enum Place { kGroups, kHosts, kHalfGroups };

class GradientCodecs : public testing::TestWithParam<std::tuple<Place, Codec>> {
 protected:
  void SetUp() override {
    const auto same = [this](const Codec& other) { return std::strcmp(other.name, codec().name) == 0; };
    const auto number = std::find_if(std::begin(kCodecs), std::end(kCodecs), same) - std::begin(kCodecs);
    if (left_out(static_cast<size_t>(place() + number))) GTEST_SKIP() << kLeftOut;
  }
  Place place() const { return std::get<0>(GetParam()); }
  Medium medium() const { return all_media()[place() == kHosts ? 2 : 0]; }
  std::vector<std::string> settings() const {
    std::vector<std::string> settings = place() == kHosts ? std::vector<std::string>() : groups_of(2);
    if (place() != kHalfGroups) return settings;
    for (const std::string& text : variables_of(codec().name)) settings.push_back(text);
    settings.emplace_back("PERSEUS_ALLREDUCE_DTYPE=0");
    return settings;
  }
  const Codec& codec() const { return std::get<1>(GetParam()); }
};

TEST_P(GradientCodecs, AllRanksGetTheSameBitsCloseToTheMean) {
  for (int size : {2, 3, 4, 6}) {
    if (place() != kHosts && size == 2) continue;  // one group: exact
    if (place() != kHalfGroups && size == 6) continue;
    const auto results = reduce(medium(), size, codec(), settings(), false);
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      const Floats& first = results[0][i];
      for (const auto& of_rank : results) ASSERT_TRUE(same_bits(of_rank[i], first)) << "tensor " << i;
      if (codec().error == 0) continue;
      for (size_t e = 0; e < first.size(); ++e) {
        double mean = 0;
        for (int rank = 0; rank < size; ++rank) mean += static_cast<double>(noise(kSizes[i], rank, e)) / size;
        // Every rank's is rounded once, and their mean once more; the largest element is about 1.
        if (std::abs(static_cast<double>(first[e]) - mean) <= 2.1 * codec().error) continue;
        FAIL() << "tensor " << i << " element " << e << ": " << first[e] << " instead of " << mean;
      }
    }
  }
}

TEST_P(GradientCodecs, BitsDependOnNoBucketsStreamsThreadsOrOrder) {
  const int size = 3, steps = 3;
  std::vector<std::string> narrow = settings(), wide = settings();
  narrow.insert(narrow.end(),
                {"PERSEUS_ALLREDUCE_STREAMS=1", "PERSEUS_CODEC_THREADS=1", "HOROVOD_FUSION_THRESHOLD=20000"});
  wide.emplace_back("PERSEUS_CODEC_THREADS=3");
  const auto fused = reduce(medium(), size, codec(), wide, false, steps);
  const auto single = reduce(medium(), size, codec(), narrow, true, steps);
  for (size_t i = 0; i < std::size(kSizes); ++i) EXPECT_TRUE(same_bits(fused[0][i], single[0][i])) << "tensor " << i;
}

TEST_P(GradientCodecs, WhatIsNotFinitePassesAndHarmsNobody) {
  WorldOptions options;
  options.overrides = settings();
  options.overrides.emplace_back("PERSEUS_CODEC_THREADS=2");
  constexpr int64_t kCount = 40000;
  run_world(
      medium(), 3,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 2; ++step) {
          Floats x = gradient(5, rank, kCount);
          const bool strange = step == 0 && rank == 1;
          if (strange) x[7] = std::numeric_limits<float>::quiet_NaN();
          if (strange) x[20000] = std::numeric_limits<float>::infinity();
          const int64_t count = kCount;
          const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
          const Outcome outcome = run(context, gradient_request("g", &tensor, codec()));
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          for (int64_t i = 0; i < kCount; ++i) {
            if (step == 0 && i == 7) ASSERT_TRUE(std::isnan(x[i]));
            else if (step == 0 && i == 20000) ASSERT_TRUE(std::isinf(x[i]) && x[i] > 0);
            else ASSERT_TRUE(std::isfinite(x[i])) << "step " << step << " element " << i;
          }
        }
      },
      options);
}

TEST_P(GradientCodecs, WhatIsHeldBackComesLater) {
  if (!codec().holds_back) GTEST_SKIP() << codec().name << " holds nothing back";
  WorldOptions options;
  options.overrides = settings();
  constexpr int64_t kCount = 20000;
  constexpr int kRanks = 3, kSteps = 60;
  run_world(
      medium(), kRanks,
      [&](int rank, perseus_context* context) {
        std::vector<double> sum(kCount, 0.0);
        const int64_t count = kCount;
        const Floats given = gradient(5, rank, kCount);
        for (int step = 0; step < kSteps; ++step) {
          Floats x = given;
          const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
          ASSERT_EQ(run(context, gradient_request("g", &tensor, codec())).code, PERSEUS_OK);
          for (int64_t i = 0; i < kCount; ++i) sum[i] += static_cast<double>(x[i]);
        }
        double missing = 0, whole = 0;
        for (int64_t i = 0; i < kCount; ++i) {
          double mean = 0;
          for (int r = 0; r < kRanks; ++r) mean += static_cast<double>(noise(5, r, static_cast<size_t>(i))) / kRanks;
          missing += std::fabs(mean * kSteps - sum[i]);
          whole += std::fabs(mean * kSteps);
        }
        // Without what was held back top-k would miss most of it, and the subset three quarters.
        EXPECT_LT(missing, 0.2 * whole);
      },
      options);
}

constexpr const char* kPlaces[] = {"groups_", "hosts_", "half_groups_"};
const auto name_of_case = [](const testing::TestParamInfo<std::tuple<Place, Codec>>& info) {
  return std::string(kPlaces[std::get<0>(info.param)]) + std::get<1>(info.param).name;
};
INSTANTIATE_TEST_SUITE_P(All, GradientCodecs,
                         testing::Combine(testing::Values(kGroups, kHosts), testing::ValuesIn(kCodecs)), name_of_case);
INSTANTIATE_TEST_SUITE_P(HalfInside, GradientCodecs,
                         testing::Combine(testing::Values(kHalfGroups), testing::ValuesIn(kHalfInside)), name_of_case);

// ---- which gradients are encoded ----

struct Sent {
  Floats result;
  uint64_t bytes;  // by rank 0
};

Sent send(const std::vector<std::string>& settings, uint64_t gradient_of, perseus_codec codec, perseus_dtype dtype,
          const std::vector<double>& rates = {0}, double argument = 0) {
  Sent sent{};
  WorldOptions options;
  options.overrides = settings;
  constexpr int64_t kCount = 500000;
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Floats x = gradient(3, rank, kCount);
        const int64_t count = dtype == PERSEUS_FLOAT64 ? kCount / 2 : kCount;
        const perseus_tensor tensor{x.data(), x.data(), &count, 1, dtype};
        perseus_request request = gradient_request("g", &tensor, Codec{"", codec, 0, 0, false});
        request.gradient_of = gradient_of;
        request.codec_argument = argument;
        for (double rate : rates) {
          request.learning_rate = rate;
          const Outcome outcome = run(context, request);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        }
        perseus_stats stats{};
        stats.struct_size = sizeof stats;
        perseus_context_stats(context, &stats);
        if (rank == 0) sent = {x, stats.shm_bytes_sent};
      },
      options);
  return sent;
}

TEST(Alone, ARankOnlyCopiesWhateverTheSettings) {
  WorldOptions options;
  options.overrides = {"PERSEUS_ALLREDUCE_DTYPE=0"};
  constexpr int64_t kCount = 20000;
  run_world(
      all_media()[0], 1,
      [&](int rank, perseus_context* context) {
        Floats x = gradient(3, rank, kCount);
        const Floats before = x;
        const perseus_tensor tensor{x.data(), x.data(), &kCount, 1, PERSEUS_FLOAT32};
        const Outcome outcome = run(context, gradient_request("g", &tensor, {"", PERSEUS_CODEC_SETTINGS, 0, 0, false}));
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        EXPECT_TRUE(same_bits(x, before)) << x[1] << " instead of " << before[1];
      },
      options);
}

// ---- gradients that stay inside hosts ----

TEST(Inside, EachInnerGroupHasItsOwnReduction) {
  struct Shape {
    int size, inner;
  };
  for (const Shape shape : {Shape{4, 2}, Shape{3, 2}, Shape{3, 1}, Shape{4, 4}}) {
    for (perseus_reduce_op op : {PERSEUS_AVERAGE, PERSEUS_SUM}) {
      for (perseus_dtype dtype : {PERSEUS_FLOAT32, PERSEUS_FLOAT64}) {
        SCOPED_TRACE(testing::Message() << shape.size << " ranks, " << shape.inner << " inside, op " << op);
        constexpr int64_t kCount = 100001;
        WorldOptions options;
        options.overrides = groups_of(shape.inner);
        run_world(
            all_media()[0], shape.size,
            [&](int rank, perseus_context* context) {
              const auto value = [](int r, int64_t i) { return 12.0 * static_cast<double>((i + 7 * r) % 100 + r); };
              const int first = rank / shape.inner * shape.inner, end = std::min(first + shape.inner, shape.size);
              std::vector<float> floats(kCount), result(kCount, -1.0F);
              std::vector<double> doubles(kCount);
              for (int64_t i = 0; i < kCount; ++i) floats[i] = static_cast<float>(doubles[i] = value(rank, i));
              const bool is_float = dtype == PERSEUS_FLOAT32;
              const perseus_tensor tensor = is_float
                                                ? perseus_tensor{floats.data(), result.data(), &kCount, 1, dtype}
                                                : perseus_tensor{doubles.data(), doubles.data(), &kCount, 1, dtype};
              perseus_request request = gradient_request("g", &tensor, Codec{"", PERSEUS_CODEC_INSIDE, 0, 0, false});
              request.op = op;
              request.prescale = 0.5;
              request.postscale = 4.0;
              const Outcome outcome = run(context, request);
              ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
              for (int64_t i = 0; i < kCount; ++i) {
                double sum = 0;
                for (int r = first; r < end; ++r) sum += 2.0 * value(r, i);
                const double mean = sum / (end - first), expected = op == PERSEUS_SUM ? mean * shape.size : mean;
                ASSERT_NEAR(is_float ? static_cast<double>(result[i]) : doubles[i], expected, 1e-3) << i;
                if (is_float) {
                  ASSERT_EQ(floats[i], static_cast<float>(value(rank, i))) << "inputs stay";
                }
              }
            },
            options);
      }
    }
  }
}

TEST(Inside, NothingTravelsBetweenGroupsOfOne) {
  const auto sent = [](perseus_codec codec) {
    uint64_t bytes = 0;
    WorldOptions options;
    options.overrides = groups_of(1);
    run_world(
        all_media()[0], 2,
        [&](int rank, perseus_context* context) {
          const int64_t count = 100000;
          Floats x = gradient(1, rank, 100000);
          const Floats before = x;
          const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
          const Outcome outcome = run(context, gradient_request("g", &tensor, Codec{"", codec, 0, 0, false}));
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          EXPECT_EQ(same_bits(x, before), codec == PERSEUS_CODEC_INSIDE);
          perseus_stats stats{};
          stats.struct_size = sizeof stats;
          perseus_context_stats(context, &stats);
          if (rank == 0) bytes = stats.shm_bytes_sent;
        },
        options);
    return bytes;
  };
  EXPECT_LT(sent(PERSEUS_CODEC_INSIDE), 10000U);
  EXPECT_GT(sent(PERSEUS_CODEC_EXACT), 400000U);
}

TEST(Inside, WhatACodecHeldBackComesAlongOnce) {
  WorldOptions options;
  options.overrides = groups_of(1);
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        const int64_t count = 50000;
        const auto reduce = [&](perseus_codec codec, double argument) {
          Floats x(50000);
          for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank)) % 64);
          const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
          const Outcome outcome = run(context, gradient_request("g", &tensor, Codec{"", codec, argument, 0, false}));
          EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          return x;
        };
        const Floats sparse = reduce(PERSEUS_CODEC_TOP_K, 0.1), all = reduce(PERSEUS_CODEC_INSIDE, 8),
                     own = reduce(PERSEUS_CODEC_INSIDE, 0);
        for (size_t i = 0; i < own.size(); ++i) {
          const float mean = (static_cast<float>((i * 7) % 64) + static_cast<float>((i * 7 + 1) % 64)) / 2;
          ASSERT_EQ(sparse[i] + all[i], 2 * mean) << i;
          ASSERT_EQ(own[i], static_cast<float>((i * 7 + static_cast<size_t>(rank)) % 64)) << i;
        }
      },
      options);
}

// ---- top-k ----

// What rank 0 sends of gradients of so many elements with one name, by step.
std::vector<uint64_t> bytes_of_steps(std::vector<std::string> settings, int64_t count, double ratio, int steps) {
  std::vector<uint64_t> bytes;
  WorldOptions options;
  options.overrides = std::move(settings);
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        uint64_t before = 0;
        for (int step = 0; step <= steps; ++step) {  // the first one says how many bytes it takes to agree
          const int64_t elements = step == 0 ? 1 : count;
          Floats x = gradient(static_cast<uint64_t>(step), rank, static_cast<size_t>(elements));
          const perseus_tensor tensor{x.data(), x.data(), &elements, 1, PERSEUS_FLOAT32};
          const char* name = step == 0 ? "first" : "g";
          const perseus_request request =
              gradient_request(name, &tensor, Codec{"", PERSEUS_CODEC_TOP_K, ratio, 0, true});
          const Outcome outcome = run(context, request);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          perseus_stats stats{};
          stats.struct_size = sizeof stats;
          perseus_context_stats(context, &stats);
          if (rank == 0 && step > 0) bytes.push_back(stats.shm_bytes_sent - before);
          before = stats.shm_bytes_sent;
        }
      },
      options);
  return bytes;
}

TEST(TopK, SmallTensorsGoWholeUnlessToldOtherwise) {
  const auto sent = [](int64_t count, std::vector<std::string> more) {
    more.insert(more.end(), {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1", "LIGHT_TOPK_WARMUP_STEPS=0"});
    return bytes_of_steps(more, count, 0.01, 1)[0];
  };
  EXPECT_GE(sent(2047, {}), 8188U);
  EXPECT_LT(sent(2048, {}), 3000U) << "8 KiB";
  EXPECT_LT(sent(2047, {"LIGHT_TOPK_THRESHOLD=0"}), 3000U);
}

TEST(TopK, TheRatioFallsInTheFirstSteps) {
  const auto sent = [](double ratio, std::vector<std::string> more) {
    more.insert(more.end(), {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1"});
    return bytes_of_steps(more, 500000, ratio, 5);
  };
  const auto steady = sent(0.01, {"LIGHT_TOPK_WARMUP_STEPS=0"});
  const auto falling = sent(0.01, {"LIGHT_TOPK_WARMUP_STEPS=4"});
  for (int step = 0; step < 4; ++step) EXPECT_GT(falling[step], falling[step + 1] * 1.5) << step;
  EXPECT_LT(falling[4], steady[4] * 1.2);
  EXPECT_LT(steady[0], falling[3]);
  const auto default_warm_up = sent(0.01, {});
  EXPECT_GT(default_warm_up[0], steady[0] * 8);
  EXPECT_LT(default_warm_up[4], default_warm_up[0]);
  EXPECT_GT(default_warm_up[4], default_warm_up[0] * 0.8) << "it takes 100 steps";
  const auto large = sent(0.05, {});
  EXPECT_LT(large[0], large[1] * 1.2) << "so many need none";
}

TEST(GradientSettings, GradientsTravelAsFloat16BetweenGroupsUnlessToldOtherwise) {
  const auto alone = groups_of(1);
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), alone.begin(), alone.end());
    return more;
  };
  const uint64_t whole = send(alone, 0, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).bytes;
  EXPECT_GT(whole, 2000000U);
  const auto is_half = [&](uint64_t bytes) { return bytes > whole * 0.49 && bytes < whole * 0.52; };
  const auto is_whole = [&](uint64_t bytes) { return bytes > whole * 0.99 && bytes < whole * 1.01; };
  EXPECT_TRUE(is_half(send(alone, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).bytes));
  EXPECT_TRUE(is_half(send(with({"PERSEUS_ALLREDUCE_DTYPE=2"}), 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).bytes));
  EXPECT_TRUE(is_whole(send(with({"PERSEUS_ALLREDUCE_DTYPE=1"}), 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).bytes));
  EXPECT_TRUE(is_whole(send(alone, 1, PERSEUS_CODEC_EXACT, PERSEUS_FLOAT32).bytes)) << "asked for";
  EXPECT_TRUE(is_whole(send(alone, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT64).bytes)) << "not float32";
  const auto from = [&](int bytes) {
    const auto settings =
        with({"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_WARMUP_STEPS=0", "LIGHT_TOPK_THRESHOLD=" + std::to_string(bytes)});
    return send(settings, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).bytes;
  };
  EXPECT_LT(from(2000000), whole * 0.05) << "as large as LIGHT_TOPK_THRESHOLD";
  EXPECT_TRUE(is_half(from(2000001))) << "smaller";
  EXPECT_TRUE(is_whole(send(with({"LIGHT_TOPK_ALLREDUCE=1"}), 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT64).bytes));
  EXPECT_LT(send(alone, 1, PERSEUS_CODEC_FLOAT16, PERSEUS_FLOAT64).bytes, whole * 0.27) << "float64, but asked for";
  EXPECT_TRUE(is_half(send(alone, 0, PERSEUS_CODEC_FLOAT16, PERSEUS_FLOAT32).bytes)) << "no gradient, but asked for";
  EXPECT_TRUE(is_whole(send({}, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).bytes)) << "one host";
  EXPECT_TRUE(is_half(send({"PERSEUS_ALLREDUCE_DTYPE=0"}, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).bytes));
  EXPECT_TRUE(same_bits(send(alone, 0, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).result,
                        send({}, 0, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32).result));
}

// Asking for no stages is no wish for less precision where there is nothing between hosts.
TEST(GradientSettings, GradientsStayExactInsideAHostWhateverTheMode) {
  const Sent exact = send({}, 0, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32);
  for (const char* mode : {"PERSEUS_ALLREDUCE_MODE=0", "HOROVOD_HIERARCHICAL_ALLREDUCE=0", "LIGHT_2D_ALLREDUCE=0",
                           "PERSEUS_ALLREDUCE_MODE=1", "LIGHT_2D_ALLREDUCE=1"}) {
    for (const char* codec : {"PERSEUS_ALLREDUCE_DTYPE=auto", "PERSEUS_ALLREDUCE_DTYPE=2",
                              "PERSEUS_ALLREDUCE_CODEC=int8", "LIGHT_TOPK_ALLREDUCE=1"}) {
      SCOPED_TRACE(std::string(mode) + " " + codec);
      testing::internal::CaptureStderr();
      const Sent sent = send({mode, codec}, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32);
      EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
      EXPECT_TRUE(same_bits(sent.result, exact.result));
      EXPECT_NEAR(static_cast<double>(sent.bytes), static_cast<double>(exact.bytes), 2000);
    }
    const Sent asked = send({mode}, 1, PERSEUS_CODEC_FLOAT16, PERSEUS_FLOAT32);
    EXPECT_TRUE(same_bits(asked.result, exact.result)) << mode << ", compression= is for what goes between hosts, too";
  }
}

TEST(GradientSettings, TheNoticeOfFloat16SaysBetweenWhatItIsUsed) {
  testing::internal::CaptureStderr();
  send(groups_of(1), 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("travel as float16 between groups of LIGHT_INTRA_SIZE ranks: "), std::string::npos) << said;
  EXPECT_EQ(said.find("hosts"), std::string::npos) << said;
}

TEST(GradientSettings, ACodecThatMayCostAccuracyIsWarnedOf) {
  for (const auto& [ratio, warns] : {std::pair("0.01", true), std::pair("0.1", true), std::pair("1", false)}) {
    std::vector<std::string> settings = groups_of(1);
    settings.insert(settings.end(), {"LIGHT_TOPK_ALLREDUCE=1", std::string("LIGHT_TOPK_RATIO=") + ratio});
    testing::internal::CaptureStderr();
    send(settings, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32);
    const std::string said = testing::internal::GetCapturedStderr();
    const std::string text = std::string("training with top-k ") + ratio + " may end with a higher loss";
    EXPECT_EQ(said.find(text) != std::string::npos, warns) << said;
  }
  for (int inner : {1, 2}) {
    testing::internal::CaptureStderr();
    send(groups_of(inner), 1, PERSEUS_CODEC_INSIDE, PERSEUS_FLOAT32, {0}, 8);
    const std::string said = testing::internal::GetCapturedStderr();
    const char* text = "inside hosts only, with rotating averages of 1/8 may end with a higher loss";
    EXPECT_EQ(said.find(text) != std::string::npos, inner == 1) << said;
  }
  // As local steps ask for gradients, which cost nothing.
  testing::internal::CaptureStderr();
  send(groups_of(1), 1, PERSEUS_CODEC_INSIDE, PERSEUS_FLOAT32);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("may end with a higher loss"), std::string::npos) << said;
}

TEST(GradientSettings, FewBitsAreWarnedOfWhereTheOptimizerIsNotKnownToBeSgd) {
  struct Case {
    const char* codec;
    std::vector<double> rates;  // of each step
    bool warns;
  };
  for (const Case& each :
       {Case{"int4", {0.5, 0.5, 0.5}, false}, Case{"int4", {0, 0.5, 0.5, 0}, false}, Case{"int4", {0, 0}, true},
        Case{"int2", {-0.5, -0.5}, true}, Case{"int2", {0.5, NAN, NAN}, true}, Case{"int8", {0, 0, 0}, false},
        Case{"auto", {0, 0, 0}, false}}) {
    std::vector<std::string> settings = groups_of(1);
    settings.insert(settings.end(), {std::string("PERSEUS_ALLREDUCE_CODEC=") + each.codec, "PERSEUS_LINK_GBIT=0.001"});
    testing::internal::CaptureStderr();
    send(settings, 1, PERSEUS_CODEC_SETTINGS, PERSEUS_FLOAT32, each.rates);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("may end with a higher loss") != std::string::npos, each.warns) << each.codec << said;
    const std::string text = std::string("training with ") + each.codec +
                             " may end with a higher loss than with exact gradients, unless the optimizer is SGD";
    if (each.warns) EXPECT_NE(said.find(text), std::string::npos) << said;
  }
}

// What PERSEUS_ALLREDUCE_DTYPE=0 sends, all ranks together, in groups of `inner`, against float16 between groups alone.
struct Total {
  Floats result;
  uint64_t bytes;
};

Total send_all(int size, int inner, const std::vector<std::string>& settings) {
  WorldOptions options;
  options.overrides = groups_of(inner);
  options.overrides.insert(options.overrides.end(), settings.begin(), settings.end());
  std::vector<Sent> sent(static_cast<size_t>(size));
  run_world(
      all_media()[0], size,
      [&](int rank, perseus_context* context) {
        Floats x = gradient(3, rank, 262144);
        const int64_t count = static_cast<int64_t>(x.size());
        const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
        const Outcome outcome = run(context, gradient_request("g", &tensor, kHalfInside[0]));
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        perseus_stats stats{};
        stats.struct_size = sizeof stats;
        perseus_context_stats(context, &stats);
        sent[static_cast<size_t>(rank)] = {x, stats.shm_bytes_sent};
      },
      options);
  Total total{sent[0].result, 0};
  for (const Sent& each : sent) {
    EXPECT_TRUE(same_bits(each.result, total.result));
    total.bytes += each.bytes;
  }
  return total;
}

TEST(GradientSettings, Float16EverywhereTakesTheStagesOfFloat16BetweenGroups) {
  constexpr double kBytes = 4.0 * 262144;
  for (const auto& [size, inner] : std::vector<std::pair<int, int>>{{4, 2}, {16, 8}, {6, 3}}) {
    for (const char* mode : {"PERSEUS_ALLREDUCE_MODE=auto", "PERSEUS_ALLREDUCE_MODE=1"}) {
      SCOPED_TRACE(std::to_string(size) + " ranks in groups of " + std::to_string(inner) + " " + mode);
      const Total mixed = send_all(size, inner, {mode, "PERSEUS_ALLREDUCE_DTYPE=2"});
      const Total half = send_all(size, inner, {mode, "PERSEUS_ALLREDUCE_DTYPE=0"});
      // Two groups send the gradient across once each; what they do inside is as much again for each other rank.
      const double across = 2 * kBytes / 2, inside = 2 * 2 * (inner - 1) * kBytes;
      EXPECT_NEAR(static_cast<double>(mixed.bytes), across + inside, 0.02 * kBytes * size);
      EXPECT_NEAR(static_cast<double>(half.bytes), across + inside / 2, 0.02 * kBytes * size);
      EXPECT_FALSE(same_bits(half.result, mixed.result)) << "inside, too";
    }
  }
}

// Numbers that every floating type has, as a tensor of that type.
template <typename T, typename Convert>
std::vector<T> short_numbers(int step, int rank, size_t count, const Convert& convert) {
  std::vector<T> x(count);
  for (size_t i = 0; i < count; ++i)
    x[i] = convert(static_cast<float>(mix(mix(static_cast<uint64_t>(step * 31 + rank)) + i) % 255) / 64.0F - 2.0F);
  return x;
}

// What rank 0 has after two steps.
template <typename T, typename Convert>
std::vector<T> reduce_as(perseus_dtype dtype, const Convert& convert, const Codec& codec, int group) {
  std::vector<T> result;
  WorldOptions options;
  options.overrides = groups_of(group);
  if (codec.codec == PERSEUS_CODEC_SETTINGS) {
    for (const std::string& text : variables_of(codec.name)) options.overrides.push_back(text);
    options.overrides.emplace_back("PERSEUS_ALLREDUCE_DTYPE=0");
  }
  // Slices of an odd number of chunks, several of them.
  options.overrides.push_back("PERSEUS_ALLREDUCE_STREAMS=12");
  run_world(
      all_media()[0], 4,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < 2; ++step) {
          const int64_t count = 400001;
          std::vector<T> x = short_numbers<T>(step, rank, static_cast<size_t>(count), convert), y(x.size());
          const perseus_tensor tensor{x.data(), y.data(), &count, 1, dtype};
          const Outcome outcome = run(context, gradient_request("g", &tensor, codec));
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          if (rank == 0) result = y;
        }
      },
      options);
  return result;
}

TEST(GradientTypes, AreEncodedAsFloat32AndRoundedOnce) {
  const auto same = [](float x) { return x; };
  const auto wide = [](float x) { return static_cast<double>(x); };
  for (const Codec& codec : {kCodecs[0], kCodecs[2], kCodecs[3], kCodecs[4], kHalfInside[1], kHalfInside[2]}) {
    if (kThreadSanitizer && codec.codec != PERSEUS_CODEC_TOP_K) continue;
    for (int group : {1, 2}) {
      if (kThreadSanitizer && group == 1) continue;
      SCOPED_TRACE(std::string(codec.name) + " in groups of " + std::to_string(group));
      const Floats floats = reduce_as<float>(PERSEUS_FLOAT32, same, codec, group);
      const auto doubles = reduce_as<double>(PERSEUS_FLOAT64, wide, codec, group);
      if (codec.codec != PERSEUS_CODEC_SETTINGS) {
        EXPECT_TRUE(std::equal(doubles.begin(), doubles.end(), floats.begin(), floats.end()));
      }
      if (codec.codec == PERSEUS_CODEC_FLOAT16) continue;  // has nothing to gain on 16 bits
      const auto halves = reduce_as<uint16_t>(PERSEUS_FLOAT16, perseus::float_to_half, codec, group);
      const auto bfloats = reduce_as<uint16_t>(PERSEUS_BFLOAT16, perseus::float_to_bfloat16, codec, group);
      const auto is = [&](const std::vector<uint16_t>& narrow, auto convert) {
        return std::equal(narrow.begin(), narrow.end(), floats.begin(), floats.end(),
                          [&](uint16_t bits, float x) { return bits == convert(x); });
      };
      EXPECT_TRUE(is(halves, perseus::float_to_half));
      EXPECT_TRUE(is(bfloats, perseus::float_to_bfloat16));
    }
  }
}

TEST(GradientSettings, RanksThatAskForDifferentCodecsAreToldAndTheJobGoesOn) {
  WorldOptions options;
  options.overrides = groups_of(1);
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Floats x = gradient(3, rank, 100);
        const int64_t count = 100;
        const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
        const Codec codec{"", rank == 0 ? PERSEUS_CODEC_FLOAT16 : PERSEUS_CODEC_EXACT, 0, 0, false};
        const Outcome outcome = run(context, gradient_request("g", &tensor, codec));
        EXPECT_EQ(outcome.code, PERSEUS_MISMATCH);
        EXPECT_NE(outcome.message.find("Mismatched compression: One rank sends"), std::string::npos) << outcome.message;
        EXPECT_EQ(run(context, gradient_request("g", &tensor, kCodecs[0])).code, PERSEUS_OK);
      },
      options);
}

TEST(GradientSettings, WhatMakesNoSenseIsRefused) {
  run_world(all_media()[0], 1, [&](int, perseus_context* context) {
    Floats x(100);
    const int64_t count = 100;
    const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
    const auto refusal = [&](int codec, double argument, perseus_reduce_op op) {
      perseus_request request = gradient_request("g", &tensor, Codec{"", PERSEUS_CODEC_EXACT, argument, 0, false});
      request.codec = codec;
      request.op = op;
      const Outcome outcome = run(context, request);
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      return outcome.message;
    };
    EXPECT_NE(refusal(PERSEUS_CODEC_FLOAT16, 0, PERSEUS_MAX).find("use op=Sum or op=Average"), std::string::npos);
    EXPECT_NE(refusal(PERSEUS_CODEC_TOP_K, 1.5, PERSEUS_SUM).find("1.5"), std::string::npos);
    EXPECT_NE(refusal(PERSEUS_CODEC_TOP_K, -1, PERSEUS_SUM).find("-1"), std::string::npos);
    EXPECT_NE(refusal(PERSEUS_CODEC_ROTATE, 2.5, PERSEUS_SUM).find("2.5"), std::string::npos);
    const perseus_tensor integers{x.data(), x.data(), &count, 1, PERSEUS_INT32};
    perseus_request request = gradient_request("i", &integers, kCodecs[2]);
    request.gradient_of = 0;
    EXPECT_NE(run(context, request).message.find("'i' is int32: int8, int4, int2, top-k, rotate and PowerSGD"),
              std::string::npos);
    EXPECT_NE(refusal(13, 0, PERSEUS_SUM).find("unknown codec 13"), std::string::npos);
  });
  WorldOptions options;
  options.overrides = {"LIGHT_TOPK_ALLREDUCE=1", "PERSEUS_DOWNSAMPLE_N_ELEMENTS=4"};
  bool refused = false;
  options.on_create_error = [&](int, perseus_code code, const std::string& message) {
    refused = code == PERSEUS_INVALID_ARGUMENT && message.find("set one of them") != std::string::npos;
  };
  run_world(all_media()[0], 1, [](int, perseus_context*) {}, options);
  EXPECT_TRUE(refused);
  refused = false;
  options.overrides = {"PERSEUS_ALLREDUCE_GRADIENT_SCALE=1e-300"};
  options.on_create_error = [&](int, perseus_code code, const std::string& message) {
    refused = code == PERSEUS_INVALID_ARGUMENT && message.find("scale is 1e-300") != std::string::npos;
  };
  run_world(all_media()[0], 1, [](int, perseus_context*) {}, options);
  EXPECT_TRUE(refused);
}

}  // namespace

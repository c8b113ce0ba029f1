// The codec auto: the cost model as a pure function, and ranks that measure, choose alike and get a named codec's bits.
#include "compression/codec_choice.h"

#include <cmath>
#include <cstring>
#include <random>

#include "world.h"

namespace {

using namespace perseus_test;
using perseus::kAutoCodecs;
using perseus::Speeds;

enum { kExact, kHalf, kInt8, kInt4, kInt2 };  // places in kAutoKinds

// Costs of encoding as on one of today's processors, in seconds per byte.
Speeds speeds(double gbit, double latency_s = 30e-6, int groups = 2) {
  Speeds s;
  s.link = {1, latency_s, 8e-9 / gbit};
  s.codecs[kHalf] = {0.05e-9, 0.05e-9, 0.5};
  s.codecs[kInt8] = {0.12e-9, 0.05e-9, 0.254};
  s.codecs[kInt4] = {0.16e-9, 0.08e-9, 0.129};
  s.codecs[kInt2] = {0.25e-9, 0.12e-9, 0.078};
  s.groups = groups;
  return s;
}

TEST(CodecChoice, SecondsAreLatencyBytesAndEncoding) {
  Speeds s = speeds(1, 1e-3, 4);
  s.shards = 2;
  // A shard of 4 MB among 4 groups: 6 MB each way at 8 ns; encoded are 4 + 1 MB, decoded 8 MB.
  EXPECT_DOUBLE_EQ(perseus::estimated_seconds(s, kExact, 8000000), 1e-3 + 6e6 * 8e-9);
  EXPECT_DOUBLE_EQ(perseus::estimated_seconds(s, kInt8, 8000000),
                   2e-3 + 6e6 * 0.254 * 8e-9 + 5e6 * 0.12e-9 + 8e6 * 0.05e-9);
}

TEST(CodecChoice, SlowLinksGetSmallerGradientsAndFastOnesExactOnes) {
  constexpr uint64_t kLarge = 8 << 20, kTiny = 512;
  EXPECT_EQ(perseus::choose_codec(speeds(0.3), kLarge), kInt2);
  EXPECT_EQ(perseus::choose_codec(speeds(4, 0), kLarge), kInt4) << "fewer bytes gain little";
  EXPECT_EQ(perseus::choose_codec(speeds(14, 0), kLarge), kInt8);
  EXPECT_EQ(perseus::choose_codec(speeds(1), kTiny), kExact) << "one exchange instead of two";
  EXPECT_EQ(perseus::choose_codec(speeds(20, 0), kLarge), kHalf);
  EXPECT_EQ(perseus::choose_codec(speeds(200, 0), kLarge), kExact);
  EXPECT_EQ(perseus::choose_codec(speeds(1, 30e-6, 1), kLarge), kExact) << "one host";
}

TEST(CodecChoice, OnlyCodecsUpToTheLeastAccurateOneAreCompared) {
  constexpr uint64_t kLarge = 8 << 20;
  EXPECT_EQ(perseus::choose_codec(speeds(0.3), kLarge, perseus::kAutoForAll), kInt8);
  EXPECT_EQ(perseus::choose_codec(speeds(0.3), kLarge, kInt4), kInt4);
  EXPECT_EQ(perseus::choose_codec(speeds(20, 0), kLarge, perseus::kAutoForAll), kHalf);
  EXPECT_EQ(perseus::choose_codec(speeds(0.3), kLarge, kExact), kExact);
}

TEST(CodecChoice, OfCodecsThatAreAboutAsFastTheMostAccurateIsTaken) {
  constexpr uint64_t kBytes = 8 << 20;
  Speeds s = speeds(1, 0);
  s.codecs[kInt4] = s.codecs[kInt8];
  s.codecs[kInt2] = s.codecs[kExact] = s.codecs[kHalf] = {0, 0, 1};
  const double int8 = perseus::estimated_seconds(s, kInt8, kBytes);
  const auto wire_for = [&](double seconds) {  // of int4, in place of int8's
    const double sending = static_cast<double>(kBytes) * 8e-9;
    return s.codecs[kInt8].wire - (int8 - seconds) / sending;
  };
  s.codecs[kInt4].wire = wire_for(0.96 * int8);
  EXPECT_EQ(perseus::choose_codec(s, kBytes), kInt8);
  s.codecs[kInt4].wire = wire_for(0.94 * int8);
  EXPECT_EQ(perseus::choose_codec(s, kBytes), kInt4);
}

TEST(CodecChoice, NoChoiceIsSlowerThanExactOrFarFromTheFastest) {
  std::mt19937_64 random(7);
  const auto between = [&](double low, double high) {
    return low * std::pow(high / low, std::uniform_real_distribution<double>(0, 1)(random));
  };
  int chosen[kAutoCodecs] = {};
  for (int i = 0; i < 20000; ++i) {
    Speeds s = speeds(between(0.01, 1000), between(1e-6, 1e-2), 2 + i % 7);
    for (auto& cost : s.codecs) {
      cost.encode_s *= between(0.1, 10);
      cost.decode_s *= between(0.1, 10);
    }
    s.shards = 1 + i % 3;
    const auto tensor = static_cast<uint64_t>(between(4, 1e9));
    const int codec = perseus::choose_codec(s, tensor);
    ++chosen[codec];
    const double seconds = perseus::estimated_seconds(s, codec, tensor);
    ASSERT_LE(seconds, perseus::estimated_seconds(s, kExact, tensor));
    for (int other = 0; other < kAutoCodecs; ++other)
      ASSERT_LE(seconds * 0.95, perseus::estimated_seconds(s, other, tensor) * (1 + 1e-12)) << codec << " " << other;
  }
  for (int count : chosen) EXPECT_GT(count, 100);
}

TEST(CodecChoice, TheLogSaysWhereChoicesChange) {
  std::array<perseus::CodecSpec, kAutoCodecs> specs;
  for (size_t i = 0; i < specs.size(); ++i) specs[i].kind = perseus::kAutoKinds[i];
  const std::string text = perseus::describe_choice(speeds(1), specs);
  EXPECT_NE(text.find("1 Gbit/s, 30 us (measurement 1)"), std::string::npos) << text;
  EXPECT_NE(text.find("Gradients travel as none, from "), std::string::npos) << text;
  EXPECT_NE(text.find("KiB int2"), std::string::npos) << text;
  EXPECT_EQ(perseus::describe_choice(speeds(1000), specs).find(", from"), std::string::npos);
}

// ---- ranks ----

using Floats = std::vector<float>;
using Shape = std::vector<int64_t>;
const Shape kShapes[] = {{3}, {5000}, {5, 3277}, {300, 5, 100}, {200, 200}};
constexpr int kSeldom = 6;  // so often another one comes

// Of an optimizer that steps in proportion to gradients.
double known_rate(int, int) { return 0.5; }

size_t product(const Shape& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return static_cast<size_t>(count);
}

struct Got {
  std::vector<Floats> results;  // of every step and tensor
  perseus_speeds speeds{};
};

// Gradients of every size, the last one seldom, in an order of each rank's own, between exact operations; what each
// rank got.
std::vector<Got> reduce(const Medium& medium, int size, const std::function<int(const Shape&)>& codec_of,
                        const std::vector<std::string>& settings, int steps = 3,
                        const std::function<void(int rank, int step)>& before = nullptr,
                        const std::function<double(int rank, int step)>& rate_of = known_rate) {
  std::vector<Got> runs(static_cast<size_t>(size));
  WorldOptions options;
  options.overrides = settings;
  run_world(
      medium, size,
      [&](int rank, perseus_context* context) {
        Got& mine = runs[static_cast<size_t>(rank)];
        for (int step = 0; step < steps; ++step) {
          if (before) before(rank, step);
          std::vector<Floats> x;
          const size_t encoded = std::size(kShapes) - (step % kSeldom == kSeldom - 1 ? 0 : 1);
          for (size_t i = 0; i < encoded; ++i) {
            x.emplace_back(product(kShapes[i]));
            std::mt19937 random(static_cast<unsigned>(1000 * step + 100 * rank) + static_cast<unsigned>(i));
            for (float& value : x.back()) value = std::uniform_real_distribution<float>(-1, 1)(random);
          }
          x.push_back(Floats(20000, static_cast<float>(rank + 1)));  // exact
          std::vector<perseus_handle> handles;
          for (size_t n = 0; n < x.size(); ++n) {
            const size_t i = (n + static_cast<size_t>(rank)) % x.size();
            const Shape shape = i < encoded ? kShapes[i] : Shape{static_cast<int64_t>(x[i].size())};
            const perseus_tensor tensor{x[i].data(), x[i].data(), shape.data(), static_cast<int>(shape.size()),
                                        PERSEUS_FLOAT32};
            const std::string name = i < encoded ? "g" + std::to_string(i) : "exact";
            perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
            request.gradient_of = 1;
            request.learning_rate = rate_of(rank, step);
            request.codec = i < encoded ? codec_of(shape) : PERSEUS_CODEC_EXACT;
            handles.emplace_back();
            ASSERT_EQ(submit(context, request, &handles.back()).code, PERSEUS_OK) << perseus_error_message();
            perseus_handle_poll(context, handles.front());  // so that rounds go on while links are measured
          }
          for (perseus_handle handle : handles) {
            const Outcome outcome = wait(context, handle);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            perseus_handle_release(context, handle);
          }
          for (float value : x.back()) ASSERT_EQ(value, static_cast<float>(size * (size + 1) / 2));
          mine.results.insert(mine.results.end(), x.begin(), x.end());
        }
        mine.speeds.struct_size = sizeof mine.speeds;
        ASSERT_EQ(perseus_group_speeds(context, 0, &mine.speeds), PERSEUS_OK);
      },
      options);
  return runs;
}

std::vector<std::string> in_groups(int ranks, std::vector<std::string> more) {
  more.insert(more.end(),
              {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=" + std::to_string(ranks), "PERSEUS_POWERSGD_WARMUP_STEPS=0"});
  return more;
}

void expect_same(const std::vector<Floats>& a, const std::vector<Floats>& b, const char* what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i)
    ASSERT_EQ(std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)), 0) << what << ", tensor " << i;
}

int chosen_by(const perseus_speeds& speeds, const Shape& shape) {
  return perseus_speeds_choose(&speeds, product(shape) * sizeof(float));
}

struct World {
  const char* name;
  int medium, size, inner;
};
constexpr World kWorlds[] = {{"two", 0, 2, 1}, {"two_and_one", 0, 3, 2}, {"two_and_two", 1, 4, 2}, {"tcp", 2, 3, 1}};
class AutoCodec : public testing::TestWithParam<World> {};

TEST_P(AutoCodec, RanksAgreeAndGetWhatTheChosenCodecsGiveByName) {
  const World& world = GetParam();
  const Medium medium = all_media()[static_cast<size_t>(world.medium)];
  // So slow that no measurement of encoding matters.
  const auto settings = in_groups(world.inner, {"PERSEUS_LINK_GBIT=0.00001"});
  const auto chosen = reduce(medium, world.size, [](const Shape&) { return PERSEUS_CODEC_AUTO; }, settings);
  const perseus_speeds& speeds = chosen[0].speeds;
  EXPECT_EQ(speeds.measurement, 1);
  EXPECT_EQ(speeds.groups, (world.size + world.inner - 1) / world.inner);
  EXPECT_DOUBLE_EQ(speeds.seconds_per_byte, 8e-4);
  EXPECT_GT(speeds.latency_s, 0);
  EXPECT_EQ(chosen_by(speeds, {128, 128}), PERSEUS_CODEC_INT2);
  EXPECT_EQ(perseus_speeds_estimate(&speeds, PERSEUS_CODEC_TOP_K, 65536), -1);
  EXPECT_LT(perseus_speeds_estimate(&speeds, PERSEUS_CODEC_INT2, 65536),
            perseus_speeds_estimate(&speeds, PERSEUS_CODEC_INT8, 65536));
  const auto named = reduce(medium, world.size, [&](const Shape& shape) { return chosen_by(speeds, shape); }, settings);
  EXPECT_EQ(named[0].speeds.measurement, 0);
  for (const Got& run : chosen) {
    EXPECT_EQ(std::memcmp(&run.speeds, &speeds, sizeof speeds), 0);
    expect_same(run.results, chosen[0].results, "of another rank");
    expect_same(run.results, named[0].results, "by name");
  }
}
INSTANTIATE_TEST_SUITE_P(Worlds, AutoCodec, testing::ValuesIn(kWorlds),
                         [](const auto& info) { return std::string(info.param.name); });

// Their second moments would grow by what few bits put off: see docs/accuracy.md.
TEST(AutoCodecMeasured, GradientsOfOtherOptimizersHaveEightBits) {
  constexpr int kSteps = 3 * kSeldom;
  for (const char* negotiation : {"PERSEUS_OFFLINE_NEG=0", "PERSEUS_OFFLINE_NEG=1"}) {
    const auto settings = in_groups(1, {"PERSEUS_LINK_GBIT=0.000000001", negotiation});
    const auto results = [&](int codec, const std::function<double(int, int)>& rate_of) {
      const auto runs =
          reduce(all_media()[0], 3, [&](const Shape&) { return codec; }, settings, kSteps, nullptr, rate_of);
      for (const Got& run : runs) expect_same(run.results, runs[0].results, "of another rank");
      return runs[0].results;
    };
    const auto eight_bits = results(PERSEUS_CODEC_INT8, known_rate);
    const auto is_scaled = [](int, int) { return -0.5; };
    const auto on_one_rank = [](int rank, int) { return rank == 1 ? 0.0 : 0.5; };
    EXPECT_NE(results(PERSEUS_CODEC_AUTO, known_rate), eight_bits);
    expect_same(results(PERSEUS_CODEC_AUTO, is_scaled), eight_bits, "negative");
    expect_same(results(PERSEUS_CODEC_AUTO, on_one_rank), eight_bits, "not known to rank 1");
    // A warm-up begins with a rate of 0, on all ranks or on one.
    for (int last : {0, 2}) {
      const auto warms_up = [&](int rank, int step) { return step == 0 && rank <= last ? 0.0 : 0.5; };
      const auto got = results(PERSEUS_CODEC_AUTO, warms_up);
      const auto first = static_cast<std::ptrdiff_t>(std::size(kShapes));
      expect_same({got.begin(), got.begin() + first}, {eight_bits.begin(), eight_bits.begin() + first}, "at first");
      EXPECT_NE(got[std::size(kShapes) + 1], eight_bits[std::size(kShapes) + 1]) << "in the second step";
    }
  }
}

TEST(AutoCodecMeasured, LinksAreMeasuredOnceAndAlikeOnAllRanks) {
  const auto runs = reduce(all_media()[0], 3, [](const Shape&) { return PERSEUS_CODEC_AUTO; }, in_groups(1, {}));
  const perseus_speeds& speeds = runs[0].speeds;
  EXPECT_EQ(speeds.measurement, 1);
  EXPECT_GT(speeds.seconds_per_byte, 0);
  EXPECT_EQ(speeds.wire[0], 1);
  EXPECT_EQ(speeds.encode_s[0], 0);
  for (int codec = 1; codec < PERSEUS_SPEEDS_CODECS; ++codec) {
    EXPECT_GT(speeds.encode_s[codec], 0);
    EXPECT_GT(speeds.decode_s[codec], 0);
    EXPECT_LT(speeds.wire[codec], speeds.wire[codec - 1]);
  }
  for (const Got& run : runs) {
    EXPECT_EQ(std::memcmp(&run.speeds, &speeds, sizeof speeds), 0);
    expect_same(run.results, runs[0].results, "of another rank");
  }
}

// With a frozen schedule, which a rank leaves for it, and without.
TEST(AutoCodecMeasured, LinksAreMeasuredAgainAtOnePlaceOfAllRanks) {
  for (const char* negotiation : {"PERSEUS_OFFLINE_NEG=0", "PERSEUS_OFFLINE_NEG=1"}) {
    const auto settings = in_groups(1, {"PERSEUS_LINK_CHECK_SECONDS=1", negotiation});
    constexpr int kSteps = 16, kLate = 10, kRanks = 3;
    // When the others have submitted what they have in this step, no measurement is outdated.
    const auto later = [](int rank, int step) {
      if (rank == 1 && step == kLate) std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    };
    const auto runs =
        reduce(all_media()[0], kRanks, [](const Shape&) { return PERSEUS_CODEC_AUTO; }, settings, kSteps, later);
    EXPECT_GE(runs[0].speeds.measurement, 2);  // more where the machine lost another second
    for (const Got& run : runs) {
      EXPECT_EQ(std::memcmp(&run.speeds, &runs[0].speeds, sizeof run.speeds), 0);
      expect_same(run.results, runs[0].results, "of another rank");
    }
  }
}

// As where a metric is reduced before the training: without rounds there would be no place to measure at.
TEST(AutoCodecMeasured, GradientsThatComeOnceAnotherOrderIsFrozenAreMeasuredForToo) {
  constexpr int kRanks = 3, kMetrics = 8, kSteps = 24;
  std::vector<perseus_speeds> speeds(kRanks);
  WorldOptions options;
  options.overrides = in_groups(1, {"PERSEUS_OFFLINE_NEG=1"});
  run_world(
      all_media()[0], kRanks,
      [&](int rank, perseus_context* context) {
        for (int step = 0; step < kMetrics + kSteps; ++step) {
          const bool metric = step < kMetrics;
          Floats x(metric ? 1 : 20000, static_cast<float>(rank + 1));
          const int64_t count = static_cast<int64_t>(x.size());
          const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
          perseus_request request = request_of(PERSEUS_ALLREDUCE, metric ? "metric" : "gradient", &tensor, 1);
          request.gradient_of = metric ? 0 : 1;
          request.codec = metric ? PERSEUS_CODEC_EXACT : PERSEUS_CODEC_AUTO;
          ASSERT_EQ(run(context, request).code, PERSEUS_OK) << perseus_error_message();
          for (const float value : x) ASSERT_NEAR(value, kRanks * (kRanks + 1) / 2, 0.2) << step;
        }
        speeds[static_cast<size_t>(rank)].struct_size = sizeof(perseus_speeds);
        ASSERT_EQ(perseus_group_speeds(context, 0, &speeds[static_cast<size_t>(rank)]), PERSEUS_OK);
      },
      options);
  for (const perseus_speeds& each : speeds) EXPECT_EQ(each.measurement, 1);
}

TEST(AutoCodecMeasured, ScheduledOrNotATensorKeepsItsCodec) {
  const auto settings = [](const char* negotiation) {
    return in_groups(1, {"PERSEUS_LINK_GBIT=0.00001", negotiation});
  };
  constexpr int kSteps = 3 * kSeldom;
  const auto chosen = reduce(
      all_media()[0], 3, [](const Shape&) { return PERSEUS_CODEC_AUTO; }, settings("PERSEUS_OFFLINE_NEG=1"), kSteps);
  const auto named = reduce(
      all_media()[0], 3, [&](const Shape& shape) { return chosen_by(chosen[0].speeds, shape); },
      settings("PERSEUS_OFFLINE_NEG=0"), kSteps);
  for (const Got& run : chosen) expect_same(run.results, named[0].results, "by name");
}

TEST(AutoCodecMeasured, InsideAHostNothingIsMeasuredAndAllIsExact) {
  const auto chosen = reduce(all_media()[0], 2, [](const Shape&) { return PERSEUS_CODEC_AUTO; }, {});
  const auto exact = reduce(all_media()[0], 2, [](const Shape&) { return PERSEUS_CODEC_EXACT; }, {});
  EXPECT_EQ(chosen[0].speeds.measurement, 0);
  expect_same(chosen[1].results, exact[0].results, "exact");
}

TEST(AutoCodecSettings, GradientsAreChosenForBySettingsAndOneWayOfSendingLessIsEnough) {
  const auto settings = [](const char* codec) { return in_groups(1, {"PERSEUS_LINK_GBIT=0.00001", codec}); };
  const auto by_settings = [](const Shape&) { return PERSEUS_CODEC_SETTINGS; };
  const auto chosen = reduce(all_media()[0], 2, by_settings, settings("PERSEUS_ALLREDUCE_CODEC=auto"));
  const auto named = reduce(
      all_media()[0], 2, [&](const Shape& shape) { return chosen_by(chosen[0].speeds, shape); },
      settings("PERSEUS_ALLREDUCE_CODEC=dtype"));
  expect_same(chosen[0].results, named[1].results, "by settings");
  const auto int8 = reduce(all_media()[0], 2, by_settings, settings("PERSEUS_ALLREDUCE_CODEC=int8"));
  const auto int8_named = reduce(
      all_media()[0], 2, [](const Shape&) { return PERSEUS_CODEC_INT8; }, settings("PERSEUS_ALLREDUCE_CODEC=dtype"));
  expect_same(int8[0].results, int8_named[1].results, "int8");
  bool refused = false;
  WorldOptions options;
  options.overrides = {"LIGHT_TOPK_ALLREDUCE=1", "PERSEUS_ALLREDUCE_CODEC=auto"};
  options.on_create_error = [&](int, perseus_code code, const std::string& message) {
    refused = code == PERSEUS_INVALID_ARGUMENT && message.find("set one of them") != std::string::npos;
  };
  run_world(all_media()[0], 1, [](int, perseus_context*) {}, options);
  EXPECT_TRUE(refused);
}

TEST(AutoCodecSettings, RanksThatDifferAreTold) {
  WorldOptions options;
  options.overrides = in_groups(1, {});
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Floats x(100, 1.0F);
        const int64_t count = 100;
        const perseus_tensor tensor{x.data(), x.data(), &count, 1, PERSEUS_FLOAT32};
        perseus_request request = request_of(PERSEUS_ALLREDUCE, "g", &tensor, 1);
        request.codec = rank == 0 ? PERSEUS_CODEC_AUTO : PERSEUS_CODEC_INT8;
        const Outcome outcome = run(context, request);
        EXPECT_EQ(outcome.code, PERSEUS_MISMATCH);
        EXPECT_NE(outcome.message.find("One rank sends auto, but another rank sends int8"), std::string::npos)
            << outcome.message;
      },
      options);
}

}  // namespace

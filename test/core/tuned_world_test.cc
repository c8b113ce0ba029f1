// Worlds that are tuned: all ranks settle on one choice, from trials that change no bits, and can replay it.
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <utility>

#include "execution/tuner.h"
#include "operation.h"

namespace {

using namespace perseus_test;
using perseus::Tuning;

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

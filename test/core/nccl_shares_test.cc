// Gradients of which the tuner gives all or some to NCCL between hosts, and the others to Perseus' own exchange.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "execution/tuner.h"
#include "nccl_ranks.h"

namespace {

using namespace perseus_test;

std::string temporary(const std::string& name) {
  return testing::TempDir() + name + std::to_string(getpid()) + unique_name();
}

// The same sums, but for the order in which four floats are added; all ranks have the same bits.
void expect_sums(const Training& a, const Training& b) {
  const Bytes &first = a.results[0], &other = b.results[0];
  for (const Bytes& each : a.results) EXPECT_TRUE(each == first);
  if (a.results.size() == 2) {
    EXPECT_TRUE(first == other) << "two floats have one sum";
    return;
  }
  ASSERT_EQ(first.size(), other.size());
  for (size_t i = 0; i < first.size(); i += sizeof(float)) {
    float x, y;
    std::memcpy(&x, first.data() + i, sizeof x);
    std::memcpy(&y, other.data() + i, sizeof y);
    ASSERT_NEAR(x, y, 1e-5) << "byte " << i;
  }
}

// Where ranks are hosts with a GPU each, only NCCL's part goes by NCCL; hosts with more use it inside, too.
TEST(NcclShares, GradientsGoByBothKindsOfLink) {
  const int steps = 3;
  const std::vector<int64_t> counts(6, 10'000);
  const std::string replayed = temporary("perseus_shares");
  for (const int percent : {50, 100}) {
    std::ofstream(replayed) << perseus::tuner_log_header() << "0,134217728,4," << percent << ",0,0,1\n";
    for (const int inside : {1, 2}) {
      SCOPED_TRACE(std::to_string(percent) + " %, " + std::to_string(inside) + " ranks in a host");
      const int ranks = 2 * inside;
      WorldOptions options;
      options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=" + std::to_string(inside),
                           "PERSEUS_TUNER_REPLAY=" + replayed, "HOROVOD_FUSION_THRESHOLD=0",
                           "PERSEUS_ALLREDUCE_DTYPE=1"};
      WorldOptions without = options;
      without.overrides.emplace_back("PERSEUS_GPU_OPERATIONS=perseus");
      const Training both = train(ranks, counts, options, steps);
      const Training by_host = train(ranks, counts, without, steps);
      // One call sums between hosts. Inside them, there are two.
      const int by_nccl = percent * 6 / 100, others = inside == 1 ? 0 : 2 * (6 - by_nccl);
      EXPECT_EQ(both.nccl_calls, (by_nccl + others) * ranks * steps);
      EXPECT_EQ(by_host.nccl_calls, 0);
      expect_sums(both, by_host);
    }
  }
  std::remove(replayed.c_str());
}

// Floats that go by NCCL go as they are, unless somebody wants something else.
TEST(NcclShares, WhatIsCompressedDoesNotGoByNcclBetweenHosts) {
  const std::vector<int64_t> counts(4, 20'000);
  const std::string replayed = temporary("perseus_compressed");
  std::ofstream(replayed) << perseus::tuner_log_header() << "0,134217728,4,100,0,0,1\n";
  const auto trained = [&](const std::vector<std::string>& more) {
    WorldOptions options;
    options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=1"};
    options.overrides.insert(options.overrides.end(), more.begin(), more.end());
    return train(2, counts, options);
  };
  const Training exact = trained({"PERSEUS_ALLREDUCE_DTYPE=1", "PERSEUS_GPU_OPERATIONS=perseus"});
  const Training int8 = trained({"PERSEUS_ALLREDUCE_CODEC=int8", "PERSEUS_GPU_OPERATIONS=perseus"});
  const Training by_default = trained({"PERSEUS_TUNER_REPLAY=" + replayed});
  const Training compressed = trained({"PERSEUS_TUNER_REPLAY=" + replayed, "PERSEUS_ALLREDUCE_CODEC=int8"});
  EXPECT_GT(by_default.nccl_calls, 0);
  expect_sums(by_default, exact);
  EXPECT_EQ(compressed.nccl_calls, 0);
  EXPECT_TRUE(compressed.results == int8.results);
  EXPECT_FALSE(compressed.results == exact.results);
  std::remove(replayed.c_str());
}

// What PERSEUS_NCCL_ENABLE=1 tries, as percentages by trial.
std::vector<int> tried_percentages(int ranks, int inside, int* nccl_calls, std::string* said) {
  const std::string log = temporary("perseus_trials");
  WorldOptions options;
  options.overrides = {"LIGHT_2D_ALLREDUCE=1",           "LIGHT_INTRA_SIZE=" + std::to_string(inside),
                       "PERSEUS_NCCL_ENABLE=1",          "HOROVOD_AUTOTUNE=1",
                       "HOROVOD_AUTOTUNE_LOG=" + log,    "PERSEUS_ALLREDUCE_STREAMS=2",
                       "HOROVOD_FUSION_THRESHOLD=65536", "PERSEUS_ALLREDUCE_DTYPE=1"};
  WorldOptions without = options;
  without.overrides = {options.overrides[0], options.overrides[1], "PERSEUS_ALLREDUCE_DTYPE=1",
                       "PERSEUS_GPU_OPERATIONS=perseus"};
  const std::vector<int64_t> counts = {7, 70'000, 1, 20'001, 16'384, 999};
  const int steps = 24;
  testing::internal::CaptureStderr();
  const Training tuned = train(ranks, counts, options, steps);
  *said = testing::internal::GetCapturedStderr();
  *nccl_calls = tuned.nccl_calls;
  expect_sums(tuned, train(ranks, counts, without, steps));
  std::vector<int> percentages;
  std::ifstream file(log);
  std::string line;
  std::getline(file, line);
  while (std::getline(file, line)) {
    int percent = -1;
    EXPECT_EQ(std::sscanf(line.c_str(), "%*d,%*d,%*d,%d,", &percent), 1) << line;
    percentages.push_back(percent);
  }
  std::remove(log.c_str());
  return percentages;
}

TEST(NcclShares, TheTunerTriesItBetweenHosts) {
  std::string said;
  int nccl_calls = 0;
  for (const int inside : {1, 2}) {
    const std::vector<int> tried = tried_percentages(2 * inside, inside, &nccl_calls, &said);
    ASSERT_EQ(tried.size(), 8U) << said;
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(tried[i], i % 2 == 0 ? 0 : 100);
    for (const size_t i : {5, 7}) {
      EXPECT_GT(tried[i], 0);
      EXPECT_LT(tried[i], 100);
    }
    EXPECT_EQ(said, "");
    EXPECT_GT(nccl_calls, 0);
  }
  EXPECT_STREQ(getenv("NCCL_RUNTIME_CONNECT"), "0");
  standin_nccl_fail_init(2);
  EXPECT_EQ(tried_percentages(2, 1, &nccl_calls, &said), (std::vector<int>{0, 100, 0, 100}));
  standin_nccl_fail_init(0);
  EXPECT_EQ(nccl_calls, 0);
  EXPECT_NE(said.find("[nccl] NCCL does not join the ranks of all hosts"), std::string::npos) << said;
}

}  // namespace

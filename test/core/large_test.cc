// Sizes at the limits: beyond 2^31 bytes (PERSEUS_TEST_FULL=1), and how much memory a rank holds beyond the tensors.
#include "operation.h"

namespace {

using namespace perseus_test;

class Large : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

TEST_P(Large, TensorsBeyondTwoGigabytesAreReducedAndBroadcast) {
  if (!full_grid()) GTEST_SKIP() << "takes 4.3 GB of memory: PERSEUS_TEST_FULL=1 runs it";
  constexpr size_t kCount = (size_t{1} << 31) + 4099;
  constexpr size_t kBlock = 1 << 20;
  const int64_t shape = kCount;
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    Bytes data(kCount);
    fill(PERSEUS_UINT8, 7, rank, 0, kCount, data.data());
    const perseus_tensor tensor{data.data(), data.data(), &shape, 1, PERSEUS_UINT8};
    Outcome outcome = run(context, request_of(PERSEUS_ALLREDUCE, "huge", &tensor, 1));
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    bool plausible = true;
    for (size_t at = 0; at < kCount; at += kBlock) {
      const size_t n = std::min(kBlock, kCount - at);
      const Bytes expected = expected_reduction(PERSEUS_UINT8, Reduction(), 7, {0, 1}, at, n, &plausible);
      ASSERT_EQ(std::memcmp(&data[at], expected.data(), n), 0) << "rank " << rank << " at " << at;
    }
    if (rank == 0) data[kCount - 1] = 99;
    else std::fill(data.begin(), data.end(), static_cast<unsigned char>(0));
    outcome = run(context, request_of(PERSEUS_BROADCAST, "huge", &tensor, 1));
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    ASSERT_EQ(data[kCount - 1], 99);
    const Bytes expected =
        expected_reduction(PERSEUS_UINT8, Reduction(), 7, {0, 1}, kCount - kBlock, kBlock - 1, &plausible);
    ASSERT_EQ(std::memcmp(&data[kCount - kBlock], expected.data(), kBlock - 1), 0);
  });
}

class Staging : public testing::TestWithParam<std::tuple<int, perseus_codec>> {};

TEST_P(Staging, StaysBelow64MiBPerRankAtAnySize) {
  const auto [medium_index, codec] = GetParam();
  const Medium medium = all_media()[static_cast<size_t>(medium_index)];
  const int kRanks = codec == PERSEUS_CODEC_EXACT ? 8 : 3;
  WorldOptions options;
  options.overrides = {"PERSEUS_ALLREDUCE_STREAMS=12", "HOROVOD_FUSION_THRESHOLD=1000000", "LIGHT_2D_ALLREDUCE=1",
                       codec == PERSEUS_CODEC_EXACT ? "LIGHT_INTRA_SIZE=8" : "LIGHT_INTRA_SIZE=1"};
  run_world(
      medium, kRanks,
      [&](int rank, perseus_context* context) {
        for (int64_t megabytes : {1, 16}) {
          // On every stream at once.
          std::vector<float> data(static_cast<size_t>(megabytes) << 18, static_cast<float>(rank));
          const int64_t shape = static_cast<int64_t>(data.size() / 12);
          std::deque<perseus_tensor> tensors;
          std::vector<perseus_handle> handles(12);
          for (size_t i = 0; i < 12; ++i) {
            float* part = data.data() + i * static_cast<size_t>(shape);
            tensors.push_back({part, part, &shape, 1, PERSEUS_FLOAT32});
            const std::string name = "part" + std::to_string(i);
            perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensors.back(), 1);
            request.codec = codec;
            const Outcome outcome = submit(context, request, &handles[i]);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          }
          for (perseus_handle handle : handles) {
            const Outcome outcome = wait(context, handle);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            ASSERT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
          }
          for (size_t i = 0; i < 12 * static_cast<size_t>(shape); i += 997)
            ASSERT_NEAR(data[i], kRanks * (kRanks - 1) / 2, 0.05);
          perseus_stats stats{};
          stats.struct_size = sizeof stats;
          ASSERT_EQ(perseus_context_stats(context, &stats), PERSEUS_OK);
          EXPECT_LE(stats.staging_bytes, uint64_t{64} << 20);
          EXPECT_GT(stats.staging_bytes, 0u) << "nothing is counted";
        }
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Media, Large, each_medium(), medium_name);

INSTANTIATE_TEST_SUITE_P(Media, Staging, testing::Combine(testing::Range(0, 3), testing::Values(PERSEUS_CODEC_EXACT)),
                         [](const auto& info) {
                           return std::string(all_media()[static_cast<size_t>(std::get<0>(info.param))].name);
                         });
INSTANTIATE_TEST_SUITE_P(Codecs, Staging,
                         testing::Combine(testing::Values(2),
                                          testing::Values(PERSEUS_CODEC_FLOAT16, PERSEUS_CODEC_INT8)));

}  // namespace

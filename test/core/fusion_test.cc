// Many requests in flight: fused or not, on one stream or many, in whatever order they are submitted and waited for,
// the bits are those of every request alone.
#include "operation.h"

namespace {

using namespace perseus_test;

std::vector<size_t> shuffled(size_t n, std::mt19937_64* random) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), *random);
  return order;
}

// `steps` times the same `requests` random requests (with other values), every rank in orders of its own.
void run_steps(const Medium& medium, int size, size_t requests, int steps, int64_t most_bytes,
               const std::vector<std::string>& overrides) {
  std::vector<std::vector<std::unique_ptr<Operation>>> operations;
  for (int step = 0; step < steps; ++step) {
    operations.emplace_back();
    for (size_t i = 0; i < requests; ++i) {
      operations.back().push_back(random_operation(i + 1, "t" + std::to_string(i), ranks_up_to(size), 0, most_bytes));
      operations.back().back()->seed += static_cast<uint64_t>(step) * 1000;
    }
  }
  WorldOptions options;
  options.overrides = overrides;
  run_world(
      medium, size,
      [&](int rank, perseus_context* context) {
        std::mt19937_64 random(static_cast<uint64_t>(rank) + 1);
        for (const auto& step : operations) {
          std::deque<Call> calls;
          for (const auto& operation : step) calls.emplace_back(*operation, rank);
          for (size_t i : shuffled(requests, &random)) {
            const Outcome outcome = calls[i].submit(context);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          }
          for (size_t i : shuffled(requests, &random)) calls[i].finish(context);
          if (testing::Test::HasFatalFailure()) return;
        }
      },
      options);
}

class Fusion : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

TEST_P(Fusion, BitsDependNeitherOnThresholdNorOnStreamsNorOnOrder) {
  // The expected bits are those of every request alone, so all settings are compared with each other, too.
  for (const char* threshold : {"0", "5000", "134217728"})
    for (const char* streams : {"1", "4", "12"}) {
      if (!full_grid() && std::string(threshold) == "5000" && std::string(streams) != "4") continue;
      for (int size : {2, 3, 8}) {
        if (!full_grid() && size == 8 && std::string(streams) != "4") continue;
        if (thin_grid() && size == 2) continue;
        SCOPED_TRACE(std::string("threshold ") + threshold + " streams " + streams + " ranks " + std::to_string(size));
        run_steps(medium(), size, 40, 3, 200000,
                  {std::string("HOROVOD_FUSION_THRESHOLD=") + threshold,
                   std::string("PERSEUS_ALLREDUCE_STREAMS=") + streams});
      }
    }
}

TEST_P(Fusion, BitsDoNotDependOnTheCycleTimeOrOnSpinning) {
  run_steps(medium(), 3, 30, 3, 100000, {"HOROVOD_CYCLE_TIME=1.5"});
  run_steps(medium(), 2, 30, 3, 100000, {"PERSEUS_SPIN_US=0"});
  run_steps(medium(), 2, 30, 3, 100000, {"PERSEUS_SPIN_US=2000"});
}

TEST_P(Fusion, TensorsAboveTheThresholdStillWork) {
  run_steps(medium(), 2, 40, 2, 4 << 20, {"HOROVOD_FUSION_THRESHOLD=65536"});
}

TEST_P(Fusion, ThousandsOfTinyTensorsInOneGo) {
  constexpr int kTensors = 5000;
  std::deque<Operation> operations;
  for (int i = 0; i < kTensors; ++i) {
    operations.emplace_back(PERSEUS_ALLREDUCE, "gradient/of/layer." + std::to_string(i), ranks_up_to(2),
                            std::vector<Operation::Tensor>{{PERSEUS_FLOAT32, {i % 7}}});
    operations.back().seed = static_cast<uint64_t>(i);
    operations.back().in_place = true;
  }
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    for (int step = 0; step < 3; ++step) {
      std::deque<Call> calls;
      for (const Operation& operation : operations) {
        calls.emplace_back(operation, rank);
        ASSERT_EQ(calls.back().submit(context).code, PERSEUS_OK) << perseus_error_message();
      }
      for (Call& call : calls) call.finish(context);
    }
    perseus_stats stats{};
    stats.struct_size = sizeof stats;
    ASSERT_EQ(perseus_context_stats(context, &stats), PERSEUS_OK);
    EXPECT_EQ(stats.operations, 3u * kTensors);
    EXPECT_LT(stats.buckets, 3u * kTensors / 2) << "tiny tensors are not fused";
  });
}

TEST_P(Fusion, OneLargeTensorGoesOverSeveralStreamsBetweenHosts) {
  Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_INT8, {(9 << 20) + 1}}});
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    Call(operation, rank).run(context);
    perseus_stats stats{};
    stats.struct_size = sizeof stats;
    ASSERT_EQ(perseus_context_stats(context, &stats), PERSEUS_OK);
    EXPECT_EQ(stats.buckets, std::string(medium().name) == "tcp" ? 2U : 1U);
  });
}

INSTANTIATE_TEST_SUITE_P(Media, Fusion, each_medium(), medium_name);

}  // namespace

// Every collective over every transport and number of ranks: results bit for bit, whatever dtype, reduction and size.
// PERSEUS_TEST_FULL=1 runs the whole grid, otherwise a part that covers all pairs.
#include "operation.h"

namespace {

using namespace perseus_test;

// Nothing, one, odd, just above what is reduced in one step, more than a chunk, many chunks per rank.
constexpr int64_t kCounts[] = {0, 1, 13, 4099, 30011, 200003};
constexpr Reduction kScales[] = {
    {PERSEUS_SUM, 1.0, 1.0}, {PERSEUS_SUM, 0.5, 1.0}, {PERSEUS_SUM, 1.0, 1.0 / 3}, {PERSEUS_SUM, 1.25, 3.0}};

bool possible(perseus_dtype dtype, perseus_reduce_op op) { return dtype != PERSEUS_BOOL || op != PERSEUS_AVERAGE; }

class Collectives : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  // Every test meets every medium and every size, every medium every size.
  void SetUp() override {
    if (left_out(turn())) GTEST_SKIP() << kLeftOut;
  }
  Medium medium() const { return all_media()[static_cast<size_t>(std::get<0>(GetParam()))]; }
  int size() const { return std::get<1>(GetParam()); }
  // Turns through the values of a dimension from world to world.
  size_t turn() const { return static_cast<size_t>(std::get<0>(GetParam()) + size()); }

  // Runs them one after the other in one world.
  void run_all(const std::deque<Operation>& operations) {
    run_world(medium(), size(), [&](int rank, perseus_context* context) {
      for (const Operation& operation : operations) {
        Call call(operation, rank);
        call.run(context);
        if (testing::Test::HasFatalFailure()) return;
      }
    });
  }
  Operation& add(std::deque<Operation>* operations, perseus_kind kind, std::vector<Operation::Tensor> tensors) {
    operations->emplace_back(kind, "t" + std::to_string(operations->size()), ranks_up_to(size()), std::move(tensors));
    operations->back().seed = operations->size() + turn() * 1000;
    return operations->back();
  }
};

TEST_P(Collectives, AllreduceGivesTheExactBitsForEveryDtypeReductionAndSize) {
  std::deque<Operation> operations;
  const auto allreduce = [&](perseus_dtype dtype, perseus_reduce_op op, size_t count, size_t scale, bool in_place) {
    if (!possible(dtype, op)) return;
    Operation& o = add(&operations, PERSEUS_ALLREDUCE, {{dtype, {kCounts[count]}}});
    o.reduction = kScales[scale];
    o.reduction.op = op;
    o.in_place = in_place;
  };
  for (perseus_dtype dtype : kDTypes)
    for (perseus_reduce_op op : kReductions) {
      if (full_grid()) {
        for (size_t i = 0; i < 6 * 4 * 2; ++i) allreduce(dtype, op, i % 6, i / 6 % 4, i / 24 == 0);
      } else {
        // Within one world every dtype meets every reduction, across worlds every size and scale.
        const size_t i = dtype + 7 * op + turn();
        allreduce(dtype, op, i % 6, i / 3 % 4, i % 2 == 0);
      }
    }
  run_all(operations);
}

TEST_P(Collectives, AllreduceLargerThanTheCachesGivesTheExactBits) {
  if (!full_grid() && size() > 3) GTEST_SKIP() << "PERSEUS_TEST_FULL=1 runs this at every number of ranks";
  std::deque<Operation> operations;
  constexpr int64_t kCount = 9 * 1024 * 1024 / 4 + 17;  // written around the cache from 8 MiB on
  for (int i = 0; i < 4; ++i) {
    Operation& o = add(&operations, PERSEUS_ALLREDUCE, {{PERSEUS_FLOAT32, {kCount}}});
    o.in_place = i % 2 == 0;
    o.reduction.op = i < 2 ? PERSEUS_SUM : PERSEUS_AVERAGE;
  }
  operations.pop_back();
  if (kThreadSanitizer && thin_grid()) operations.pop_back();
  run_all(operations);
}

TEST_P(Collectives, GroupedTensorsOfMixedDtypesFinishTogether) {
  std::deque<Operation> operations;
  for (perseus_reduce_op op : {PERSEUS_SUM, PERSEUS_MAX, PERSEUS_PRODUCT}) {
    Operation& o = add(&operations, PERSEUS_ALLREDUCE, {});
    for (size_t i = 0; i < 20; ++i)
      o.tensors.push_back({kDTypes[(i + turn()) % 10], {kCounts[(i * 3 + i / 6 + turn()) % 5]}});
    o.reduction.op = op;
    o.in_place = op == PERSEUS_MAX;
  }
  Operation& gather = add(&operations, PERSEUS_ALLGATHER, {});
  Operation& scatter = add(&operations, PERSEUS_REDUCESCATTER, {});
  Operation& spread = add(&operations, PERSEUS_BROADCAST, {});
  for (size_t i = 0; i < 10; ++i) {
    gather.tensors.push_back({kDTypes[i], {static_cast<int64_t>(i), 3}});
    scatter.tensors.push_back({kDTypes[i], {static_cast<int64_t>(i) * 7, 3}});
    spread.tensors.push_back({kDTypes[i], {kCounts[(i + turn()) % 6]}});
  }
  spread.root = size() - 1;
  run_all(operations);
}

TEST_P(Collectives, AllgatherConcatenatesWhateverRowsEveryRankHas) {
  std::deque<Operation> operations;
  const Shape shapes[] = {{0}, {1}, {5}, {7, 3}, {2, 0, 4}, {0, 5}, {3, 1001}, {1, 20011}};
  for (const Shape& shape : shapes)
    for (size_t d = 0; d < 10; d += full_grid() ? 1 : 3) {
      const perseus_dtype dtype = kDTypes[(d + turn()) % 10];
      add(&operations, PERSEUS_ALLGATHER, {{dtype, shape}});
      Operation& uneven = add(&operations, PERSEUS_ALLGATHER, {{dtype, shape}});
      // Some rank without rows, one with many.
      for (int r = 0; r < size(); ++r) uneven.rows.push_back((r * 2 + static_cast<int>(d)) % (size() + 1));
    }
  run_all(operations);
}

TEST_P(Collectives, BroadcastReachesEverybodyFromEveryRoot) {
  std::deque<Operation> operations;
  for (int root = 0; root < size(); ++root)
    for (size_t c = 0; c < 6; ++c)
      for (size_t d = 0; d < 10; d += full_grid() ? 1 : root == 0 ? 5 : 10) {
        const size_t turned = d + c + static_cast<size_t>(root) + turn();
        Operation& o = add(&operations, PERSEUS_BROADCAST, {{kDTypes[turned % 10], {kCounts[c]}}});
        o.root = root;
        o.in_place = turned % 2 == 0;
      }
  run_all(operations);
}

TEST_P(Collectives, AlltoallDeliversRowsInSourceOrder) {
  std::deque<Operation> operations;
  const size_t ranks = static_cast<size_t>(size());
  for (int64_t tail : {1, 3, 0, 20011})
    for (size_t d = 0; d < 10; d += full_grid() ? 1 : 3) {
      const perseus_dtype dtype = kDTypes[(d + turn()) % 10];
      add(&operations, PERSEUS_ALLTOALL, {{dtype, {2 * size(), tail}}});  // equal parts
      add(&operations, PERSEUS_ALLTOALL, {{dtype, {0, tail}}});
      Operation& o = add(&operations, PERSEUS_ALLTOALL, {{dtype, {0, tail}}});
      for (size_t from = 0; from < ranks; ++from) {
        o.splits.emplace_back();
        for (size_t to = 0; to < ranks; ++to) o.splits.back().push_back(static_cast<int64_t>((from * 3 + to + d) % 4));
        // Rows behind those that splits speak of stay where they are.
        o.rows.push_back(std::accumulate(o.splits[from].begin(), o.splits[from].end(), int64_t{0}) +
                         static_cast<int64_t>(from % 3));
      }
    }
  run_all(operations);
}

TEST_P(Collectives, ReducescatterGivesTheFirstRanksTheExtraRows) {
  std::deque<Operation> operations;
  for (int64_t rows :
       {int64_t{0}, int64_t{1}, int64_t{size() - 1}, int64_t{size()}, int64_t{2 * size() + 1}, int64_t{300}})
    for (int64_t tail : {1, 3, 0, 511})
      for (size_t d = 0; d < 10; d += full_grid() ? 1 : 5) {
        const size_t turned = d + static_cast<size_t>(rows + tail) + turn();
        Operation& o = add(&operations, PERSEUS_REDUCESCATTER, {{kDTypes[turned % 10], {rows, tail}}});
        o.reduction = kScales[turned / 2 % 4];
        o.reduction.op = kReductions[turned / 3 % 5];
        if (!possible(o.tensors[0].dtype, o.reduction.op)) o.reduction.op = PERSEUS_SUM;
      }
  run_all(operations);
}

TEST_P(Collectives, BarrierWaitsForTheLastRank) {
  std::atomic<int> arrived{0};
  run_world(medium(), size(), [&](int rank, perseus_context* context) {
    for (int round = 0; round < 5; ++round) {
      if (rank == round % size()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      ++arrived;
      const Outcome outcome = run(context, request_of(PERSEUS_BARRIER, "barrier", nullptr, 0));
      ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
      ASSERT_GE(arrived, (round + 1) * size());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, testing::Combine(testing::Range(0, 3), testing::Values(1, 2, 3, 4, 7, 8)),
                         [](const auto& info) {
                           return std::string(all_media()[static_cast<size_t>(std::get<0>(info.param))].name) +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace

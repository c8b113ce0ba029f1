// Ranks that run out of data: they join, and give zeros until all have joined.
#include <numeric>

#include "operation.h"

namespace {

using namespace perseus_test;

class Join : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

// The rank that joined last.
int join(perseus_context* context) {
  perseus_handle handle = 0;
  Outcome outcome = submit(context, request_of(PERSEUS_JOIN, "join", nullptr, 0), &handle);
  EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  outcome = wait(context, handle);
  EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  perseus_output output{};
  output.struct_size = sizeof output;
  EXPECT_EQ(perseus_handle_output(context, handle, 0, &output), PERSEUS_OK);
  perseus_handle_release(context, handle);
  return static_cast<int>(output.size);
}

int64_t value(int rank, int step, size_t i) { return (rank + 2) * 1000 - static_cast<int64_t>(i % 997) * (step + 1); }

// An allreduce of int64 under way.
struct Reduction64 {
  std::vector<int64_t> memory;
  int64_t shape[1];
  perseus_handle handle = 0;

  Reduction64(perseus_context* context, const std::string& name, perseus_reduce_op op, int rank, int step, size_t n,
              bool transient = false)
      : memory(n), shape{static_cast<int64_t>(n)} {
    for (size_t i = 0; i < n; ++i) memory[i] = value(rank, step, i);
    const perseus_tensor tensor{memory.data(), memory.data(), shape, 1, PERSEUS_INT64};
    perseus_request r = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
    r.op = op;
    r.transient = transient ? 1 : 0;
    const Outcome outcome = submit(context, r, &handle);
    EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  }
  Reduction64(const Reduction64&) = delete;
  Reduction64& operator=(const Reduction64&) = delete;

  // `active`: the ranks that gave values, of `size`.
  void finish(perseus_context* context, perseus_reduce_op op, const std::vector<int>& active, int size, int step) {
    const Outcome outcome = wait(context, handle);
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    perseus_handle_release(context, handle);
    for (size_t i = 0; i < memory.size(); ++i) {
      int64_t sum = 0, most = active.size() < static_cast<size_t>(size) ? 0 : INT64_MIN;
      for (int rank : active) {
        sum += value(rank, step, i);
        most = std::max(most, value(rank, step, i));
      }
      const int64_t expected = op == PERSEUS_MAX ? most : op == PERSEUS_AVERAGE ? sum / size : sum;
      ASSERT_EQ(memory[i], expected) << "element " << i << " of step " << step;
    }
  }
};

// Rank r has r * 3 + 2 steps of data.
int steps_of(int rank) { return rank * 3 + 2; }
std::vector<int> active_at(int step, int size) {
  std::vector<int> active;
  for (int rank = 0; rank < size; ++rank)
    if (step < steps_of(rank)) active.push_back(rank);
  return active;
}

void train(perseus_context* context, int rank, int size) {
  constexpr perseus_reduce_op kOps[] = {PERSEUS_SUM, PERSEUS_AVERAGE, PERSEUS_MAX};
  for (int step = 0; step < steps_of(rank); ++step) {
    std::deque<Reduction64> calls;
    for (size_t t = 0; t < 12; ++t) {
      // One is new at every step, one changes its size, one is large.
      const std::string name = t == 10 ? "new" + std::to_string(step) : "t" + std::to_string(t);
      const size_t n = t == 9 ? 5 + static_cast<size_t>(step) : t == 11 ? 300000 : t * 7;
      calls.emplace_back(context, name, kOps[t % 3], rank, step, n, t == 10);
    }
    for (size_t t = 0; t < 12; ++t) calls[t].finish(context, kOps[t % 3], active_at(step, size), size, step);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(Join, RanksWithoutDataGiveZerosUntilAllHaveJoined) {
  for (int size : {1, 2, 3, 4}) {
    if (kThreadSanitizer && thin_grid() && size != 3) continue;
    run_world(medium(), size, [&](int rank, perseus_context* context) {
      for (int epoch = 0; epoch < (thin_grid() ? 2 : 3); ++epoch) {
        train(context, rank, size);
        EXPECT_EQ(join(context), size - 1) << "the one with the most data";
      }
    });
  }
}

TEST_P(Join, WhatARankHadUnderWayWhenItJoinedIsFinished) {
  for (bool known : {false, true})
    run_world(medium(), 3, [&](int rank, perseus_context* context) {
      const std::string own = "of rank " + std::to_string(rank);
      if (known) {
        // All names have been agreed on before.
        for (int r = 0; r < 3; ++r)
          Reduction64(context, "of rank " + std::to_string(r), PERSEUS_SUM, rank, 0, 50)
              .finish(context, PERSEUS_SUM, {0, 1, 2}, 3, 0);
      }
      Reduction64 call(context, own, PERSEUS_SUM, rank, 1, 50);
      const int last = join(context);
      EXPECT_TRUE(last >= 0 && last < 3) << last;
      call.finish(context, PERSEUS_SUM, {rank}, 3, 1);
      // Nothing is left over: the names work again.
      for (int r = 0; r < 3; ++r)
        Reduction64(context, "of rank " + std::to_string(r), PERSEUS_SUM, rank, 2, 50)
            .finish(context, PERSEUS_SUM, {0, 1, 2}, 3, 2);
    });
}

perseus_request bare(perseus_kind kind, const std::string& name, const perseus_tensor& tensor) {
  perseus_request r = request_of(kind, name.c_str(), &tensor, 1);
  r.root = 1;
  return r;
}

TEST_P(Join, OtherCollectivesFailWhileARankHasJoined) {
  for (bool known : {false, true})
    run_world(medium(), 3, [&](int rank, perseus_context* context) {
      std::vector<float> in(6, 1.0F), out(3 * 6);  // with room for what is gathered
      const int64_t shape[1] = {6};
      const perseus_tensor tensor{in.data(), out.data(), shape, 1, PERSEUS_FLOAT32};
      const std::vector<std::pair<perseus_kind, std::string>> kinds{{PERSEUS_ALLGATHER, "Allgather is not supported"},
                                                                    {PERSEUS_BROADCAST, "Broadcast is not supported"},
                                                                    {PERSEUS_ALLTOALL, "Alltoall is not supported"},
                                                                    {PERSEUS_REDUCESCATTER, "Reducescatter is not"}};
      for (const auto& kind : kinds) {
        if (!known) break;
        EXPECT_EQ(run(context, bare(kind.first, kind.second, tensor)).code, PERSEUS_OK);
      }
      if (rank != 0) {
        // That rank 0 has joined shows in the first result that lacks its part.
        std::vector<int64_t> sum{1};
        const int64_t one[1] = {1};
        const perseus_tensor count{sum.data(), sum.data(), one, 1, PERSEUS_INT64};
        do {
          sum[0] = 1;
          ASSERT_EQ(run(context, request_of(PERSEUS_ALLREDUCE, "count", &count, 1)).code, PERSEUS_OK);
        } while (sum[0] != 2);
        for (const auto& [kind, text] : kinds) {
          const Outcome outcome = run(context, bare(kind, text, tensor));
          EXPECT_EQ(outcome.code, PERSEUS_MISMATCH) << outcome.message;
          EXPECT_NE(outcome.message.find(text), std::string::npos) << outcome.message;
        }
        const std::vector<int> members{1, 2};
        perseus_request add = request_of(PERSEUS_ADD_GROUP, "add", nullptr, 0);
        add.ranks = members.data();
        add.rank_count = 2;
        EXPECT_EQ(run(context, add).code, PERSEUS_MISMATCH);
        EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "barrier", nullptr, 0)).code, PERSEUS_OK);
      }
      EXPECT_NE(join(context), 0);
      for (const auto& kind : kinds) EXPECT_EQ(run(context, bare(kind.first, kind.second, tensor)).code, PERSEUS_OK);
    });
}

TEST_P(Join, UnnamedRequestsPairAgainWhenAllHaveJoined) {
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    for (int turn = 0; turn < 2; ++turn) {
      for (int step = 0; step <= rank; ++step) perseus_group_next_number(context, 0);
      join(context);
      for (int64_t number = 1; number < 4; ++number) EXPECT_EQ(perseus_group_next_number(context, 0), number);
    }
  });
}

TEST_P(Join, MismatchesAmongTheOthersAreStillFound) {
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    if (rank != 2) {
      std::vector<float> memory(8);
      const int64_t shape[1] = {rank == 0 ? 3 : 4};
      const perseus_tensor tensor{memory.data(), memory.data(), shape, 1, PERSEUS_FLOAT32};
      const Outcome outcome = run(context, request_of(PERSEUS_ALLREDUCE, "t", &tensor, 1));
      EXPECT_EQ(outcome.code, PERSEUS_MISMATCH);
      EXPECT_NE(outcome.message.find("Mismatched ALLREDUCE tensor shapes"), std::string::npos) << outcome.message;
    }
    join(context);
  });
}

INSTANTIATE_TEST_SUITE_P(Media, Join, each_medium(), medium_name);

}  // namespace

// What ranks disagree about ends in the same error on every rank, in Horovod's words, and the job goes on; what they
// agree about works whatever order and time it is submitted in.
#include "operation.h"

namespace {

using namespace perseus_test;

// A request without an Operation behind it, on scratch memory.
struct Bare {
  perseus_kind kind = PERSEUS_ALLREDUCE;
  std::vector<perseus_dtype> dtypes{PERSEUS_FLOAT32};
  Shape shape{17, 3};
  perseus_reduce_op op = PERSEUS_SUM;
  double prescale = 1.0, postscale = 1.0;
  int root = 0;
  std::vector<int64_t> splits;
  std::vector<int> ranks;
  bool null = false, overlapping = false;
  const char* refusal = nullptr;

  Outcome run(perseus_context* context, const char* name) const {
    std::vector<std::vector<double>> memory(dtypes.size() * 2, std::vector<double>(1024, 1.0));
    if (null)
      for (auto& buffer : memory) std::vector<double>().swap(buffer);
    std::vector<perseus_tensor> tensors;
    for (size_t i = 0; i < dtypes.size(); ++i) {
      double* const output = overlapping ? &memory[1][10 * (dtypes.size() - i)] : memory[2 * i + 1].data();
      tensors.push_back({memory[2 * i].data(), output, shape.data(), static_cast<int>(shape.size()), dtypes[i]});
    }
    perseus_request r = request_of(kind, name, tensors.data(), static_cast<int>(tensors.size()));
    r.op = op;
    r.prescale = prescale;
    r.postscale = postscale;
    r.root = root;
    r.refusal = refusal;
    if (!splits.empty()) {
      r.splits = splits.data();
      r.split_count = static_cast<int>(splits.size());
    }
    if (!ranks.empty()) {
      r.ranks = ranks.data();
      r.rank_count = static_cast<int>(ranks.size());
    }
    return perseus_test::run(context, r);
  }
};

Bare bare(perseus_kind kind, Shape shape) {
  Bare made;
  made.kind = kind;
  made.shape = std::move(shape);
  return made;
}
template <typename Change>
Bare with(Bare request, Change change) {
  change(request);
  return request;
}

struct Mismatch {
  Bare rank_0, others;
  const char* text;
};

std::vector<Mismatch> mismatches() {
  const Bare sum;  // allreduce of [17, 3] float32
  const auto half = [](Bare& b) { b.prescale = 0.5; };
  const auto other_type = [](Bare& b) { b.dtypes = {PERSEUS_INT32}; };
  const Bare gather = bare(PERSEUS_ALLGATHER, {4, 10});
  const Bare spread = bare(PERSEUS_BROADCAST, {5});
  Bare add = bare(PERSEUS_ADD_GROUP, {});
  add.dtypes.clear();
  const Bare parts = bare(PERSEUS_ALLTOALL, {6});
  return {
      {with(parts, [](Bare& b) { b.refusal = "its splits are wrong"; }), parts,
       "Rank 0 cannot take part: its splits are wrong"},
      {sum, with(sum, [](Bare& b) { b.refusal = "no memory", b.dtypes.clear(); }),
       "Rank 1 cannot take part: no memory"},
      {sum, with(sum, other_type),
       "Mismatched data types: One rank had type float32, but another rank had type int32."},
      {with(sum, [](Bare& b) { b.dtypes = {PERSEUS_FLOAT16}; }), with(sum, [](Bare& b) { b.dtypes = {PERSEUS_BOOL}; }),
       "Mismatched data types: One rank had type float16, but another rank had type bool."},
      {sum, bare(PERSEUS_ALLGATHER, {17, 3}),
       "Mismatched operations: One rank did an ALLREDUCE, but another rank did an ALLGATHER."},
      {bare(PERSEUS_REDUCESCATTER, {6}), bare(PERSEUS_ALLTOALL, {6}),
       "Mismatched operations: One rank did an REDUCESCATTER, but another rank did an ALLTOALL."},
      {sum, bare(PERSEUS_ALLREDUCE, {18, 3}),
       "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [17, 3], but another rank sent a tensor of "
       "shape [18, 3]."},
      {sum, bare(PERSEUS_ALLREDUCE, {51}),
       "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [17, 3], but another rank sent a tensor of "
       "shape [51]."},
      {sum, bare(PERSEUS_ALLREDUCE, {0, 3}), "Mismatched ALLREDUCE tensor shapes: "},
      {spread, bare(PERSEUS_BROADCAST, {}),
       "Mismatched BROADCAST tensor shapes: One rank sent a tensor of shape [5], but another rank sent a tensor of "
       "shape []."},
      {bare(PERSEUS_REDUCESCATTER, {5}), bare(PERSEUS_REDUCESCATTER, {6}),
       "Mismatched REDUCESCATTER tensor shapes: One rank sent a tensor of shape [5], but another rank sent a tensor of "
       "shape [6]."},
      {sum, with(sum, half), "Mismatched prescale and/or postscale factors:"},
      {sum, with(sum, [](Bare& b) { b.postscale = 2; }), "Mismatched prescale and/or postscale factors:"},
      {sum, with(sum, [](Bare& b) { b.op = PERSEUS_MIN; }),
       "Mismatched reduction operation: One rank sent reduction op 1, but another rank sent reduction op 3."},
      {with(sum, [](Bare& b) { b.op = PERSEUS_AVERAGE; }), sum,
       "Mismatched reduction operation: One rank sent reduction op 0, but another rank sent reduction op 1."},
      {bare(PERSEUS_ALLGATHER, {}), bare(PERSEUS_ALLGATHER, {}),
       "Process-set rank zero tried to ALLGATHER a rank-zero tensor."},
      {bare(PERSEUS_ALLTOALL, {}), bare(PERSEUS_ALLTOALL, {}),
       "Process-set rank zero tried to ALLTOALL a rank-zero tensor."},
      {bare(PERSEUS_REDUCESCATTER, {}), bare(PERSEUS_REDUCESCATTER, {}),
       "Process-set rank zero tried to REDUCESCATTER a rank-zero tensor."},
      {gather, bare(PERSEUS_ALLGATHER, {4, 10, 1}),
       "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank 2, but another rank sent a tensor of rank "
       "3."},
      {gather, bare(PERSEUS_ALLGATHER, {3, 20}),
       "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 10, but another rank sent "
       "a tensor with dimension 1 equal to 20."},
      {bare(PERSEUS_ALLTOALL, {3, 10}), bare(PERSEUS_ALLTOALL, {6, 20}),
       "Mismatched ALLTOALL tensor shapes: One rank sent a tensor with dimension 1 equal to 10, but another rank sent "
       "a tensor with dimension 1 equal to 20."},
      {spread, with(spread, [](Bare& b) { b.root = 1; }),
       "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1."},
      {with(sum, [](Bare& b) { b.dtypes = {PERSEUS_FLOAT32, PERSEUS_INT8}; }), sum,
       "One rank sent 2 tensors, but another rank sent 1."},
      {with(add, [](Bare& b) { b.ranks = {0, 1}; }), with(add, [](Bare& b) { b.ranks = {1, 2}; }),
       "Mismatched process sets"},
      // Which comes first when several things differ.
      {sum, with(bare(PERSEUS_ALLGATHER, {9}), other_type), "Mismatched data types: "},
      {sum, with(bare(PERSEUS_BROADCAST, {9}), half), "Mismatched operations: "},
      {sum, with(bare(PERSEUS_ALLREDUCE, {9}), half), "Mismatched ALLREDUCE tensor shapes: "},
      {sum, with(with(sum, half), [](Bare& b) { b.op = PERSEUS_MAX; }),
       "Mismatched prescale and/or postscale factors:"},
  };
}

class Negotiated : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

TEST_P(Negotiated, MismatchesReachEveryRankAndTheJobGoesOn) {
  constexpr int kRanks = 3;
  const std::vector<Mismatch> cases = mismatches();
  run_world(medium(), kRanks, [&](int rank, perseus_context* context) {
    for (size_t i = 0; i < cases.size(); ++i) {
      // A name of its own, and one that all cases share and that was used well in between.
      for (const std::string& name : {"case" + std::to_string(i), std::string("shared")}) {
        const Outcome outcome = (rank == 0 ? cases[i].rank_0 : cases[i].others).run(context, name.c_str());
        ASSERT_EQ(outcome.code, PERSEUS_MISMATCH) << cases[i].text << " but got: " << outcome.message;
        EXPECT_NE(outcome.message.find(cases[i].text), std::string::npos) << outcome.message;
        EXPECT_NE(outcome.message.find(name), std::string::npos) << "which tensor? " << outcome.message;
        Operation same(PERSEUS_ALLREDUCE, name, ranks_up_to(kRanks), {{PERSEUS_INT16, {21}}});
        Operation other(PERSEUS_ALLGATHER, "other" + name, ranks_up_to(kRanks), {{PERSEUS_INT16, {2}}});
        Call(same, rank).run(context);
        Call(other, rank).run(context);
      }
      ASSERT_FALSE(testing::Test::HasFatalFailure());
    }
  });
}

TEST_P(Negotiated, ErrorsThatOneRankSeesAloneStartNothing) {
  const Bare sum;
  const auto splits = [](std::vector<int64_t> values) {
    return with(bare(PERSEUS_ALLTOALL, {6}), [&](Bare& b) { b.splits = std::move(values); });
  };
  constexpr int64_t kHuge = int64_t{1} << 62;
  const struct {
    Bare request;
    const char* text;
  } cases[] = {
      {with(bare(PERSEUS_BROADCAST, {5}), [](Bare& b) { b.root = 2; }),
       "broadcast received invalid root rank 2 for provided process set"},
      {with(bare(PERSEUS_BROADCAST, {5}), [](Bare& b) { b.root = -1; }), "broadcast received invalid root rank -1"},
      {bare(PERSEUS_ALLTOALL, {5}), "not an even multiple of the number of workers"},
      {splits({1, 2, 3}), "Number of entries in splits does not equal number of workers"},
      {splits({4, 3}), "Sum of splits entries is greater than the first dimension"},
      {splits({7, 0}), "Sum of splits entries is greater than the first dimension"},
      {splits({-1, 3}), "negative"},
      {splits({kHuge, kHuge}), "Sum of splits entries is greater than the first dimension"},
      {with(sum, [](Bare& b) { b.op = PERSEUS_AVERAGE, b.dtypes = {PERSEUS_BOOL}; }),
       "Average is not defined for bool"},
      {with(sum, [](Bare& b) { b.op = PERSEUS_ADASUM, b.dtypes = {PERSEUS_INT32}; }), "Adasum needs floating point"},
      {bare(PERSEUS_ALLREDUCE, {3, -1}), "negative dimension"},
      {bare(PERSEUS_ALLREDUCE, {kHuge, 8}), "too large"},
      {bare(PERSEUS_ALLGATHER, {0, kHuge, kHuge}), "too large"},
      {with(sum, [](Bare& b) { b.null = true; }), "null"},
      {with(sum, [](Bare& b) { b.dtypes.assign(3, PERSEUS_FLOAT32), b.overlapping = true; }),
       "Results of an allreduce would overlap in memory"},
      {with(sum, [](Bare& b) { b.dtypes = {static_cast<perseus_dtype>(10)}; }), "unknown dtype 10"},
      {with(sum, [](Bare& b) { b.dtypes.clear(); }), "needs at least one tensor"},
      {bare(PERSEUS_BARRIER, {1}), "Barrier takes no tensors"},
      {with(sum, [](Bare& b) { b.op = static_cast<perseus_reduce_op>(6); }), "unknown kind or reduction"},
  };
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    EXPECT_EQ(Bare().run(context, "").code, PERSEUS_INVALID_ARGUMENT);
    EXPECT_EQ(Bare().run(context, nullptr).code, PERSEUS_INVALID_ARGUMENT);
    for (const auto& one : cases) {
      if (rank == 1) {
        const Outcome outcome = one.request.run(context, "t");
        ASSERT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT) << one.text << " but got: " << outcome.message;
        EXPECT_NE(outcome.message.find(one.text), std::string::npos) << outcome.message;
      }
      Operation good(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT64, {3}}});
      Call(good, rank).run(context);
      ASSERT_FALSE(testing::Test::HasFatalFailure());
    }
  });
}

TEST_P(Negotiated, HandlesThatAreNotOursAreErrors) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(2), {{PERSEUS_FLOAT32, {5}}});
    Call call(operation, rank);
    call.run(context);
    for (perseus_handle handle : {call.handle(), perseus_handle{0}, perseus_handle{-5}, perseus_handle{1} << 60}) {
      EXPECT_EQ(perseus_handle_poll(context, handle), -1);
      EXPECT_EQ(perseus_handle_wait(context, handle, 1000), PERSEUS_INVALID_ARGUMENT);
      EXPECT_NE(std::string(perseus_error_message()).find("was not created or has been cleared"), std::string::npos);
      EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_INVALID_ARGUMENT);
    }
    // In progress: rank 1 has not submitted yet.
    Operation later(PERSEUS_ALLREDUCE, "later", ranks_up_to(2), {{PERSEUS_FLOAT32, {5}}});
    Call pending(later, rank);
    if (rank == 0) {
      ASSERT_EQ(pending.submit(context).code, PERSEUS_OK);
      EXPECT_EQ(perseus_handle_poll(context, pending.handle()), 0);
      EXPECT_EQ(perseus_handle_wait(context, pending.handle(), 5), PERSEUS_IN_PROGRESS);
      EXPECT_EQ(perseus_handle_release(context, pending.handle()), PERSEUS_INVALID_ARGUMENT);
      perseus_output out{};
      EXPECT_EQ(perseus_handle_output(context, pending.handle(), 0, &out), PERSEUS_INVALID_ARGUMENT);
      EXPECT_EQ(perseus_handle_take_output(context, pending.handle(), 0), nullptr);
    }
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "now", nullptr, 0)).code, PERSEUS_OK);
    if (rank == 1) {
      ASSERT_EQ(pending.submit(context).code, PERSEUS_OK);
    }
    pending.finish(context);
  });
}

TEST_P(Negotiated, OneNameTwiceInFlightIsAnErrorOfTheSecond) {
  run_world(medium(), 2, [&](int rank, perseus_context* context) {
    Operation operation(PERSEUS_ALLREDUCE, "twice", ranks_up_to(2), {{PERSEUS_FLOAT32, {1000}}});
    for (int step = 0; step < 3; ++step) {
      Call first(operation, rank), second(operation, rank);
      if (rank == 0) {
        ASSERT_EQ(first.submit(context).code, PERSEUS_OK);
        const Outcome outcome = second.submit(context);
        EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
        EXPECT_NE(outcome.message.find("Requested to allreduce, allgather, or broadcast a tensor with the same name as "
                                       "another tensor that is currently being processed"),
                  std::string::npos)
            << outcome.message;
      }
      EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "submitted", nullptr, 0)).code, PERSEUS_OK);
      if (rank == 1) {
        ASSERT_EQ(first.submit(context).code, PERSEUS_OK);
      }
      first.finish(context);
      second.run(context);  // free again
    }
  });
}

TEST_P(Negotiated, AKnownNameMayComeWithANewShapeInAnyOrderOfRanks) {
  constexpr int kRanks = 3;
  std::deque<Operation> operations;
  for (int64_t i = 0; i < 24; ++i) {
    const perseus_kind kind = i % 5 == 4 ? PERSEUS_ALLGATHER : PERSEUS_ALLREDUCE;
    operations.emplace_back(kind, "t" + std::to_string(i % 2), ranks_up_to(kRanks),
                            std::vector<Operation::Tensor>{{kDTypes[i / 4 % 10], {1 + i / 3 % 4, 3}}});
    operations.back().seed = static_cast<uint64_t>(i);
  }
  run_world(medium(), kRanks, [&](int rank, perseus_context* context) {
    for (size_t i = 0; i < operations.size(); ++i) {
      // Somebody else is first and last every time; a known neighbour keeps rounds going.
      std::this_thread::sleep_for(std::chrono::milliseconds((static_cast<size_t>(rank) + i) % kRanks));
      Call call(operations[i], rank);
      call.run(context);
      ASSERT_FALSE(testing::Test::HasFatalFailure());
    }
  });
}

TEST_P(Negotiated, ANewShapeOnOneRankOnlyIsAMismatchWhateverTheOthersHavePending) {
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    for (int odd = 0; odd < 6; ++odd) {
      Operation known(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_FLOAT32, {17, 3}}});
      Call(known, rank).run(context);
      // The odd one comes first three times, last three times.
      const bool is_odd = rank == odd % 3;
      if (is_odd == (odd < 3)) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      const Outcome outcome = bare(PERSEUS_ALLREDUCE, is_odd ? Shape{18, 3} : Shape{17, 3}).run(context, "t");
      ASSERT_EQ(outcome.code, PERSEUS_MISMATCH) << outcome.message;
      EXPECT_NE(outcome.message.find("Mismatched ALLREDUCE tensor shapes"), std::string::npos) << outcome.message;
    }
  });
}

TEST_P(Negotiated, NamesPairWhateverOrderEveryRankSubmitsThemIn) {
  constexpr int kRanks = 4;
  std::deque<Operation> operations;
  for (int64_t i = 0; i < 60; ++i)
    operations.emplace_back(PERSEUS_ALLREDUCE, "t" + std::to_string(i), ranks_up_to(kRanks),
                            std::vector<Operation::Tensor>{{kDTypes[i % 10], {1 + i}}});
  run_world(medium(), kRanks, [&](int rank, perseus_context* context) {
    std::mt19937 random(static_cast<unsigned>(rank));
    for (int step = 0; step < 4; ++step) {
      std::deque<Call> calls;
      for (const Operation& operation : operations) calls.emplace_back(operation, rank);
      std::vector<size_t> order(calls.size());
      std::iota(order.begin(), order.end(), size_t{0});
      std::shuffle(order.begin(), order.end(), random);
      for (size_t i : order) {
        ASSERT_EQ(calls[i].submit(context).code, PERSEUS_OK) << perseus_error_message();
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      }
      for (Call& call : calls) call.finish(context);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Media, Negotiated, each_medium(), medium_name);

}  // namespace

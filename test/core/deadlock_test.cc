// Ranks that all wait for each other's requests get an error that says so, and go on; whoever may still be helped is
// waited for.
#include "operation.h"

namespace {

using namespace perseus_test;
using std::chrono::milliseconds;

const std::vector<std::string> kSoon = {"HOROVOD_STALL_CHECK_TIME_SECONDS=1", "PERSEUS_LOG_LEVEL=error"};
// Longer than a deadlock takes to be told.
constexpr milliseconds kLate{2500};

struct Sum : Operation {
  Sum(std::string name, std::vector<int> members, int set = 0)
      : Operation(PERSEUS_ALLREDUCE, std::move(name), std::move(members), {{PERSEUS_FLOAT32, {1000}}}) {
    group = set;
  }
};

void expect_deadlock(const Outcome& outcome, const std::vector<std::string>& lines) {
  EXPECT_EQ(outcome.code, PERSEUS_MISMATCH) << outcome.message;
  EXPECT_EQ(outcome.message.rfind("Deadlock: every rank waits", 0), 0u) << outcome.message;
  std::string all = "\nWaiting ranks:";
  for (const std::string& line : lines) all += "\n" + line;
  ASSERT_GE(outcome.message.size(), all.size());
  EXPECT_EQ(outcome.message.substr(outcome.message.size() - all.size()), all);
}

// Submits, waits and releases.
Outcome outcome_of(perseus_context* context, const Operation& operation, int rank) {
  Call call(operation, rank);
  Outcome outcome = call.submit(context);
  EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
  if (outcome.code != PERSEUS_OK) return outcome;
  outcome = wait(context, call.handle());
  perseus_handle_release(context, call.handle());
  return outcome;
}

// The same in worlds side by side, over every medium: each waits for the clock.
void everywhere(int size, const std::vector<std::string>& overrides,
                const std::function<void(int, perseus_context*)>& body) {
  std::vector<std::thread> worlds;
  for (const Medium& medium : all_media())
    worlds.emplace_back([&, medium] {
      WorldOptions options;
      options.overrides = overrides;
      run_world(medium, size, body, options);
    });
  for (std::thread& world : worlds) world.join();
}

int add_set(perseus_context* context, const std::vector<int>& ranks) {
  perseus_request request = request_of(PERSEUS_ADD_GROUP, "add", nullptr, 0);
  request.ranks = ranks.data();
  request.rank_count = static_cast<int>(ranks.size());
  perseus_handle handle = 0;
  EXPECT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
  EXPECT_EQ(wait(context, handle).code, PERSEUS_OK);
  perseus_output output{};
  output.struct_size = sizeof output;
  EXPECT_EQ(perseus_handle_output(context, handle, 0, &output), PERSEUS_OK);
  perseus_handle_release(context, handle);
  return static_cast<int>(output.size);
}

TEST(Deadlock, RanksThatWaitForDifferentNamesGetTheSameErrorAndGoOn) {
  everywhere(2, kSoon, [](int rank, perseus_context* context) {
    const Sum reduce("k", ranks_up_to(2)), known("known", ranks_up_to(2));
    Operation gather(PERSEUS_ALLGATHER, "gather.k", ranks_up_to(2), {{PERSEUS_FLOAT32, {3, 5}}});
    Call(known, rank).run(context);
    const std::vector<const Operation*> others{&gather, &known};
    for (const Operation* other : others) {
      expect_deadlock(outcome_of(context, rank == 0 ? reduce : *other, rank), {"0: [k]", "1: [" + other->name + "]"});
      // Both names are free again, on both ranks.
      Call(reduce, rank).run(context);
      Call(*other, rank).run(context);
    }
  });
}

TEST(Deadlock, WhatWasSubmittedAndIsNotAwaitedEndsToo) {
  everywhere(3, kSoon, [](int rank, perseus_context* context) {
    // Every rank misses another one of three gradients.
    std::vector<std::unique_ptr<Sum>> operations;
    for (const char* name : {"a", "b", "c"}) operations.push_back(std::make_unique<Sum>(name, ranks_up_to(3)));
    for (int turn = 0; turn < 2; ++turn) {
      std::deque<Call> calls;
      for (int i = 0; i < 3; ++i) {
        if (i == rank) continue;
        calls.emplace_back(*operations[static_cast<size_t>(i)], rank);
        EXPECT_EQ(calls.back().submit(context).code, PERSEUS_OK);
      }
      for (Call& call : calls) {
        expect_deadlock(wait(context, call.handle()), {"0: [b]", "1: [a]", "2: [a]"});
        perseus_handle_release(context, call.handle());
      }
      for (const auto& operation : operations) Call(*operation, rank).run(context);
    }
  });
}

TEST(Deadlock, ARankThatComputesIsWaitedFor) {
  everywhere(3, kSoon, [](int rank, perseus_context* context) {
    const Sum a("a", ranks_up_to(3)), b("b", ranks_up_to(3));
    Call(a, rank).run(context);
    if (rank == 2) std::this_thread::sleep_for(kLate);
    Call first(rank == 0 ? a : b, rank), second(rank == 0 ? b : a, rank);
    // Rank 1 would wait for rank 0, were it not for what it has submitted before.
    EXPECT_EQ(first.submit(context).code, PERSEUS_OK);
    EXPECT_EQ(second.submit(context).code, PERSEUS_OK);
    first.finish(context);
    second.finish(context);
  });
}

TEST(Deadlock, AThreadThatHasSubmittedBeforeMaySubmitAgain) {
  everywhere(2, kSoon, [](int rank, perseus_context* context) {
    const Sum a("a", ranks_up_to(2)), b("b", ranks_up_to(2)), c("c", ranks_up_to(2));
    std::thread other([&] {
      Call(c, rank).run(context);
      std::this_thread::sleep_for(kLate);
      Call(rank == 0 ? b : a, rank).run(context);
    });
    Call(rank == 0 ? a : b, rank).run(context);
    other.join();
  });
}

TEST(Deadlock, AThreadThatHasEndedDoesNot) {
  everywhere(2, kSoon, [](int rank, perseus_context* context) {
    const Sum c("c", ranks_up_to(2));
    std::thread([&] { Call(c, rank).run(context); }).join();
    expect_deadlock(outcome_of(context, Sum(rank == 0 ? "a" : "b", ranks_up_to(2)), rank), {"0: [a]", "1: [b]"});
  });
}

TEST(Deadlock, OfAProcessSetEndsWhileOthersCompute) {
  everywhere(3, kSoon, [](int rank, perseus_context* context) {
    const int set = add_set(context, {0, 1});
    const Sum all("all", ranks_up_to(3));
    const std::string tail = " (process set " + std::to_string(set) + ")]";
    if (rank == 2) std::this_thread::sleep_for(kLate);
    else
      expect_deadlock(outcome_of(context, Sum(rank == 0 ? "a" : "b", {0, 1}, set), rank),
                      {"0: [a" + tail, "1: [b" + tail});
    Call(all, rank).run(context);
  });
}

TEST(Deadlock, WhoWaitsElsewhereMayBeHelpedThere) {
  everywhere(3, kSoon, [](int rank, perseus_context* context) {
    const int lower = add_set(context, {0, 1}), upper = add_set(context, {1, 2});
    const Sum first("first", {1, 2}, upper), second("second", {0, 1}, lower);
    // Rank 0 waits for rank 1, rank 1 for rank 2, which computes.
    if (rank == 2) std::this_thread::sleep_for(kLate);
    if (rank > 0) Call(first, rank).run(context);
    if (rank < 2) Call(second, rank).run(context);
    Call(Sum("all", ranks_up_to(3)), rank).run(context);
  });
}

TEST(Deadlock, ARankThatHasJoinedStaysJoined) {
  everywhere(3, kSoon, [](int rank, perseus_context* context) {
    if (rank > 0)
      expect_deadlock(outcome_of(context, Sum(rank == 1 ? "a" : "b", ranks_up_to(3)), rank),
                      {"0: [join]", "1: [a]", "2: [b]"});
    const Outcome outcome = run(context, request_of(PERSEUS_JOIN, "join", nullptr, 0));
    EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    Call(Sum("after", ranks_up_to(3)), rank).run(context);
  });
}

TEST(Deadlock, UnderAScheduleEndsTheSchedule) {
  std::vector<std::string> settings = kSoon;
  settings.push_back("PERSEUS_OFFLINE_NEG=1");
  everywhere(2, settings, [](int rank, perseus_context* context) {
    const Sum step("step", ranks_up_to(2)), metric("metric", ranks_up_to(2));
    for (int i = 0; i < 10; ++i) Call(step, rank).run(context);
    expect_deadlock(outcome_of(context, rank == 0 ? step : metric, rank), {"0: [step]", "1: [metric]"});
    for (int i = 0; i < 10; ++i) Call(step, rank).run(context);
  });
}

TEST(Deadlock, IsNotLookedForWhereTheStallCheckIsOff) {
  everywhere(2, {"HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_STALL_CHECK_DISABLE=1"},
             [](int rank, perseus_context* context) {
               const Sum operation(rank == 0 ? "a" : "b", ranks_up_to(2));
               Call call(operation, rank);
               EXPECT_EQ(call.submit(context).code, PERSEUS_OK);
               const perseus_code code = wait(context, call.handle(), 2500).code;
               EXPECT_TRUE(code == PERSEUS_IN_PROGRESS || code == PERSEUS_OK) << code;  // the other may be through
               const Sum other(rank == 0 ? "b" : "a", ranks_up_to(2));
               Call(other, rank).run(context);
               call.finish(context);
             });
}

}  // namespace

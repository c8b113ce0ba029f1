// Groups that overlap, work at once and come and go: nothing waits for what it need not, nothing is mixed up.
#include <filesystem>
#include <fstream>

#include "operation.h"

namespace {

using namespace perseus_test;
using std::chrono::milliseconds;

perseus_request group_request(perseus_kind kind, const char* name, const std::vector<int>& ranks) {
  perseus_request r = request_of(kind, name, nullptr, 0);
  r.ranks = ranks.data();
  r.rank_count = static_cast<int>(ranks.size());
  return r;
}

// The new group's id, or -1 and the outcome.
int add_group(perseus_context* context, const std::vector<int>& ranks, Outcome* outcome = nullptr) {
  perseus_handle handle = 0;
  Outcome result = submit(context, group_request(PERSEUS_ADD_GROUP, "add", ranks), &handle);
  int id = -1;
  if (result.code == PERSEUS_OK) {
    result = wait(context, handle);
    perseus_output out{};
    out.struct_size = sizeof out;
    if (result.code == PERSEUS_OK && perseus_handle_output(context, handle, 0, &out) == PERSEUS_OK)
      id = static_cast<int>(out.size);
    perseus_handle_release(context, handle);
  }
  if (outcome == nullptr) {
    EXPECT_EQ(result.code, PERSEUS_OK) << result.message;
  } else {
    *outcome = result;
  }
  return id;
}
Outcome remove_group(perseus_context* context, int id) {
  const std::vector<int> ranks{id};
  return run(context, group_request(PERSEUS_REMOVE_GROUP, "remove", ranks));
}
std::vector<int> group_ranks(perseus_context* context, int id) {
  std::vector<int> ranks(16);
  const int count = perseus_group_ranks(context, id, ranks.data(), 16);
  if (count < 0) return {};
  ranks.resize(static_cast<size_t>(count));
  return ranks;
}

class Groups : public testing::TestWithParam<int> {
 protected:
  Medium medium() const { return all_media()[static_cast<size_t>(GetParam())]; }
};

struct Plan {
  std::vector<std::vector<int>> groups;  // ids 1, 2, …; the world is group 0
  std::vector<std::vector<std::unique_ptr<Operation>>> steps;
};

Plan plan_of(int size, std::vector<std::vector<int>> groups, int steps, int requests, int64_t most_bytes) {
  Plan plan;
  plan.groups = std::move(groups);
  for (int step = 0; step < steps; ++step) {
    plan.steps.emplace_back();
    for (int g = 0; g <= static_cast<int>(plan.groups.size()); ++g)
      for (int i = 0; i < requests; ++i) {
        // Names are those of other groups, too.
        const uint64_t seed = static_cast<uint64_t>(g * 1000 + i + 1);
        const std::vector<int> members = g == 0 ? ranks_up_to(size) : plan.groups[static_cast<size_t>(g) - 1];
        plan.steps.back().push_back(random_operation(seed, "t" + std::to_string(i), members, g, most_bytes));
        plan.steps.back().back()->seed += static_cast<uint64_t>(step) * 100000;
      }
  }
  return plan;
}

// Every rank submits its part of each step in a random order of its own and waits in another. `leave`: for a third it
// only polls, and a third it leaves alone until the next step is submitted.
void run_plan(perseus_context* context, int rank, const Plan& plan, bool leave) {
  for (size_t g = 0; g < plan.groups.size(); ++g)
    ASSERT_EQ(add_group(context, plan.groups[g]), static_cast<int>(g) + 1);
  std::mt19937_64 random(static_cast<uint64_t>(rank) + 77);
  std::deque<std::deque<Call>> kept;
  std::vector<Call*> left_alone;
  for (const auto& step : plan.steps) {
    kept.emplace_back();
    std::vector<Call*> calls;
    for (const auto& operation : step) {
      const std::vector<int>& members = operation->members;
      if (std::find(members.begin(), members.end(), rank) == members.end()) continue;
      calls.push_back(&kept.back().emplace_back(*operation, rank));
    }
    std::shuffle(calls.begin(), calls.end(), random);
    for (Call* call : left_alone) call->finish(context);  // their names come again
    left_alone.clear();
    for (Call* call : calls) {
      const Outcome outcome = call->submit(context);
      ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
      if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    }
    std::shuffle(calls.begin(), calls.end(), random);
    for (size_t i = 0; i < calls.size(); ++i) {
      if (leave && i % 3 == 0) {
        left_alone.push_back(calls[i]);
        continue;
      }
      if (leave && i % 3 == 1)
        for (int tries = 0; tries < 60000 && perseus_handle_poll(context, calls[i]->handle()) == 0; ++tries)
          std::this_thread::sleep_for(milliseconds(1));
      calls[i]->finish(context);
    }
    ASSERT_FALSE(testing::Test::HasFatalFailure());
  }
  for (Call* call : left_alone) call->finish(context);
  // A rank that ends shuts the world down: not before the groups that it is no member of are done.
  EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "done", nullptr, 0)).code, PERSEUS_OK);
}

TEST_P(Groups, OverlappingGroupsNeedNoCommonOrder) {
  for (const char* streams : {"4", "1"}) {
    WorldOptions options;
    options.overrides = {std::string("PERSEUS_ALLREDUCE_STREAMS=") + streams};
    const Plan plan = plan_of(3, {{0, 1}, {1, 2}, {0, 2}}, full_grid() ? 200 : 20, 15, 300000);
    run_world(medium(), 3, [&](int rank, perseus_context* context) { run_plan(context, rank, plan, false); }, options);
  }
}

TEST_P(Groups, CallersMayLeaveEarly) {
  WorldOptions options;
  options.overrides = {"HOROVOD_FUSION_THRESHOLD=20000"};
  const Plan plan = plan_of(4, {{0, 1, 2}, {1, 2, 3}, {0, 3}, {2}, {0, 2}}, full_grid() ? 200 : 20, 10, 200000);
  run_world(medium(), 4, [&](int rank, perseus_context* context) { run_plan(context, rank, plan, true); }, options);
}

TEST_P(Groups, ManyGroupsWorkAtOnceWithTheWorld) {
  std::vector<std::vector<int>> groups;
  for (int a = 0; a < 4; ++a)
    for (int b = a + 1; b < 4; ++b) groups.push_back({a, b});
  for (int left_out = 0; left_out < 4; ++left_out) {
    groups.push_back(ranks_up_to(4));
    groups.back().erase(groups.back().begin() + left_out);
  }
  const Plan plan = plan_of(4, groups, full_grid() ? 100 : 8, 6, 100000);
  run_world(medium(), 4, [&](int rank, perseus_context* context) { run_plan(context, rank, plan, true); });
}

TEST_P(Groups, AGroupDoesNotWaitForRanksOutsideIt) {
  std::atomic<bool> outsider_may_go_on{false};
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    const int pair = add_group(context, {0, 1});
    // Rank 2 has a request of the world to answer, and is busy elsewhere.
    Operation world(PERSEUS_ALLREDUCE, "world", ranks_up_to(3), {{PERSEUS_FLOAT32, {70000}}});
    Call late(world, rank);
    if (rank == 2) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(300);
      while (!outsider_may_go_on && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(milliseconds(1));
      EXPECT_TRUE(outsider_may_go_on) << "the group waited for a rank that is no member";
    }
    ASSERT_EQ(late.submit(context).code, PERSEUS_OK);
    for (int step = 0; step < 20 && rank != 2; ++step) {
      Operation operation(PERSEUS_ALLREDUCE, "pair", {0, 1}, {{PERSEUS_FLOAT64, {step * 1000}}});
      operation.group = pair;
      Call(operation, rank).run(context);
    }
    if (rank == 0) outsider_may_go_on = true;
    late.finish(context);
  });
}

TEST_P(Groups, IdsAreReusedInTheOrderTheyWereFreed) {
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    EXPECT_EQ(add_group(context, {0, 1}), 1);
    EXPECT_EQ(add_group(context, {1, 2}), 2);
    EXPECT_EQ(add_group(context, {0, 2}), 3);
    EXPECT_EQ(group_ranks(context, 0), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(group_ranks(context, 2), (std::vector<int>{1, 2}));
    EXPECT_EQ(remove_group(context, 2).code, PERSEUS_OK);
    EXPECT_EQ(remove_group(context, 1).code, PERSEUS_OK);
    EXPECT_EQ(group_ranks(context, 2), std::vector<int>());
    EXPECT_EQ(perseus_group_ranks(context, 2, nullptr, 0), -1);
    EXPECT_EQ(add_group(context, {0}), 2);
    EXPECT_EQ(add_group(context, {0, 1}), 1);
    EXPECT_EQ(add_group(context, {2}), 4);
    // The new owner of an id shares nothing with the old one, names included.
    for (int step = 0; step < 30; ++step) {
      Operation operation(PERSEUS_ALLREDUCE, "t", {0, 1}, {{kDTypes[step % 10], {step + 1}}});
      operation.group = 1;
      if (rank != 2) Call(operation, rank).run(context);
      EXPECT_EQ(remove_group(context, 1).code, PERSEUS_OK);
      EXPECT_EQ(add_group(context, {0, 1}), 1);
    }
  });
}

TEST_P(Groups, WrongUseIsRefusedAndNamesTheReason) {
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    Outcome outcome;
    EXPECT_EQ(add_group(context, {1, 2}), 1);
    EXPECT_EQ(add_group(context, {1, 2}, &outcome), -1);
    EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
    EXPECT_NE(outcome.message.find("Attempted to add a duplicate process set"), std::string::npos) << outcome.message;
    EXPECT_EQ(add_group(context, {0, 1, 2}, &outcome), -1);
    EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT) << "the world is a group, too";
    for (const std::vector<int>& ranks : {std::vector<int>{0, 3}, {-1, 0}, {1, 0}, {1, 1}, {}}) {
      EXPECT_EQ(add_group(context, ranks, &outcome), -1);
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT) << outcome.message;
    }
    for (int id : {0, 7, -1}) {
      EXPECT_EQ(remove_group(context, id).code, PERSEUS_INVALID_ARGUMENT) << id;
    }
    Operation operation(PERSEUS_ALLREDUCE, "t", ranks_up_to(3), {{PERSEUS_FLOAT32, {5}}});
    operation.group = 1;
    if (rank == 0) {
      outcome = Call(operation, rank).submit(context);
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      EXPECT_NE(outcome.message.find("Allreduce: Rank 0 is not a member of the provided process set."),
                std::string::npos)
          << outcome.message;
    }
    operation.group = 9;
    outcome = Call(operation, rank).submit(context);
    EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
    EXPECT_NE(outcome.message.find("Process set provided does not exist, or has not been registered."),
              std::string::npos)
        << outcome.message;
    Operation spread(PERSEUS_BROADCAST, "b", {1, 2}, {{PERSEUS_FLOAT32, {5}}});
    spread.group = 1;
    if (rank == 1) {
      const Call call(spread, rank);
      perseus_request request = call.request();
      perseus_handle handle = 0;
      request.root = 0;
      outcome = submit(context, request, &handle);
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      EXPECT_NE(outcome.message.find("broadcast received invalid root rank 0"), std::string::npos) << outcome.message;
    }
    spread.root = 2;  // a global rank
    if (rank != 0) Call(spread, rank).run(context);
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0)).code, PERSEUS_OK);
  });
}

TEST_P(Groups, RequestsOfARemovedGroupEndWhateverTheirState) {
  constexpr int64_t kCount = 1 << 19;
  for (int round = 0; round < (full_grid() ? 50 : 8); ++round)
    run_world(medium(), 3, [&](int rank, perseus_context* context) {
      const int id = add_group(context, {0, 1});
      Operation under_way(PERSEUS_ALLREDUCE, "under way", {0, 1}, {{PERSEUS_FLOAT32, {kCount}}});
      Operation pending(PERSEUS_ALLREDUCE, "pending", {0, 1}, {{PERSEUS_FLOAT32, {kCount}}});
      under_way.group = pending.group = id;
      std::deque<Call> calls;
      if (rank != 2) {
        ASSERT_EQ(calls.emplace_back(under_way, rank).submit(context).code, PERSEUS_OK);
        std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
      }
      if (rank == 0) {
        ASSERT_EQ(calls.emplace_back(pending, rank).submit(context).code, PERSEUS_OK);
      }
      ASSERT_EQ(remove_group(context, id).code, PERSEUS_OK);
      for (Call& call : calls) {
        const Outcome outcome = wait(context, call.handle());
        EXPECT_TRUE(outcome.code == PERSEUS_ABORTED || outcome.code == PERSEUS_OK) << outcome.code << outcome.message;
        if (outcome.code == PERSEUS_OK) call.check(context);
      }
      Operation world(PERSEUS_ALLREDUCE, "world", ranks_up_to(3), {{PERSEUS_FLOAT32, {kCount}}});
      Call(world, rank).run(context);
    });
}

// Descriptors and mappings of shared memory.
size_t held_by_this_process() {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  auto held = static_cast<size_t>(std::distance(begin(descriptors), end(descriptors)));
  std::ifstream mappings("/proc/self/maps");
  for (std::string line; std::getline(mappings, line);) held += line.find("memfd:perseus") != std::string::npos;
  return held;
}

TEST_P(Groups, RemovedGroupsLeaveNothingBehind) {
  constexpr int kRounds = 12;
  constexpr uint64_t kStagingOfRounds = kRounds * 512 * 1024;  // with a ring or buffer for each
  Barrier barrier(3);
  size_t before = 0;
  run_world(medium(), 3, [&](int rank, perseus_context* context) {
    Operation operation(PERSEUS_ALLREDUCE, "t", {0, 1}, {{PERSEUS_FLOAT32, {100'000}}});
    uint64_t staging = 0;
    for (int round = 0; round <= kRounds; ++round) {
      operation.group = add_group(context, {0, 1});
      if (rank != 2) Call(operation, rank).run(context);
      EXPECT_EQ(remove_group(context, operation.group).code, PERSEUS_OK);
      if (round == 0) {
        // What goes after the removal has gone by then: connections of the world are made meanwhile.
        EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "warm", nullptr, 0)).code, PERSEUS_OK);
        std::this_thread::sleep_for(milliseconds(300));
        barrier.wait();
        if (rank == 0) before = held_by_this_process();
        staging = stats_of(context).staging_bytes;
        barrier.wait();
      }
    }
    EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0)).code, PERSEUS_OK);
    if (rank == 0) {
      EXPECT_TRUE(comes_true([&] { return held_by_this_process() <= before; }, 20))
          << held_by_this_process() << " descriptors and mappings instead of " << before;
    }
    EXPECT_LT(stats_of(context).staging_bytes, staging + kStagingOfRounds / 2);
    barrier.wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Media, Groups, each_medium(), medium_name);

}  // namespace

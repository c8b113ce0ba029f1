// NCCL that fails, hangs or cannot be ended, and GPUs and memory that fail it: nobody waits for ever.
#include <optional>

#include "gpu.h"
#include "nccl.h"

namespace {

using namespace perseus_test;

const Medium kOneHost{"shm", "shm"}, kHosts{"tcp", "tcp"};
const Medium kPlaces[] = {kOneHost, kHosts};

// Two ranks whose communicator is there begin a sum that NCCL does not end: what they do meanwhile, and what they are
// told.
void hold_a_sum(const Medium& medium, std::vector<std::string> settings, const std::function<void()>& meanwhile,
                const std::function<void(const Outcome&)>& check) {
  WorldOptions options;
  options.overrides = std::move(settings);
  if (medium.transport == kHosts.transport) options.overrides.emplace_back("PERSEUS_GPU_OPERATIONS=nccl");
  const auto first = sum_of("first", 2, 1000), second = sum_of("second", 2, 1000);
  Barrier barrier(2);
  run_world(
      medium, 2,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        DeviceCall warm(*first, rank, &gpu);
        ASSERT_EQ(warm.submit(context).code, PERSEUS_OK);
        warm.finish(context);
        barrier.wait();
        standin_nccl_hold(1);
        const int begun = standin_nccl_calls();  // the other rank's cannot begin before ours
        DeviceCall call(*second, rank, &gpu);
        ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
        barrier.wait();  // no rank submits to a world that has ended
        EXPECT_TRUE(comes_true([&] { return standin_nccl_calls() >= begun + 2; }));
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the calls return
        meanwhile();
        const Outcome outcome = wait(context, call.handle(), 30'000);
        EXPECT_NE(outcome.code, PERSEUS_OK);
        check(outcome);
        EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
        barrier.wait();
        standin_nccl_break(0);
        standin_nccl_hold_aborts(0);
        standin_nccl_hold(0);
      },
      options);
}

void break_nccl() { standin_nccl_break(1); }

void expect_in(const Outcome& outcome, const char* text) {
  EXPECT_NE(outcome.message.find(text), std::string::npos) << outcome.message;
}

TEST(NcclFaults, AnErrorOfNcclEndsTheWorld) {
  for (const Medium& medium : kPlaces) {
    hold_a_sum(medium, {}, break_nccl, [](const Outcome& outcome) { expect_in(outcome, "[nccl] a collective"); });
    EXPECT_EQ(standin_nccl_communicators(), 0) << medium.name;
  }
}

// Work that NCCL never ends meets the time limit, and nothing touches its memory after that.
TEST(NcclFaults, ACollectiveThatHangsIsGivenUp) {
  for (const Medium& medium : kPlaces) {
    const auto check = [](const Outcome& outcome) { expect_in(outcome, "no data to or from rank"); };
    hold_a_sum(medium, {"GLOO_TIMEOUT_SECONDS=1"}, [] {}, check);
    EXPECT_EQ(standin_nccl_communicators(), 0) << medium.name;
  }
}

// NCCL cannot be ended either, because something else on the GPU never ends: nobody waits for that for long.
TEST(NcclFaults, AnAbortThatHangsHoldsNobody) {
  const auto hold_aborts_and_break = [] {
    standin_nccl_hold_aborts(1);
    break_nccl();
  };
  hold_a_sum(kOneHost, {}, hold_aborts_and_break, [](const Outcome& outcome) {
    expect_in(outcome, "[nccl] a collective");
    EXPECT_EQ(standin_nccl_communicators(), 2);
  });
  while (standin_nccl_communicators() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Collectives of several process sets are behind each other on a GPU, and all of them end.
TEST(NcclFaults, CollectivesOfSeveralProcessSetsAreGivenUp) {
  const std::vector<std::vector<int>> sets = {{0, 1}, {0, 2}, {1, 2}};
  std::vector<std::unique_ptr<Operation>> sums;
  sums.push_back(sum_of("world", 3, 1000));
  for (size_t i = 0; i < sets.size(); ++i)
    sums.push_back(sum_in_set("set" + std::to_string(i), 3, static_cast<int>(i) + 1, sets[i], 1000));
  WorldOptions options;
  options.overrides = {"GLOO_TIMEOUT_SECONDS=1"};
  Barrier barrier(3);
  run_world(
      kOneHost, 3,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        for (const std::vector<int>& set : sets) add_set(context, set);
        std::deque<DeviceCall> calls;
        const auto submit_all = [&] {
          for (const auto& sum : sums) {
            if (std::count(sum->members.begin(), sum->members.end(), rank) == 0) continue;
            ASSERT_EQ(calls.emplace_back(*sum, rank, &gpu).submit(context).code, PERSEUS_OK);
          }
        };
        submit_all();
        for (DeviceCall& call : calls) call.finish(context);
        calls.clear();
        barrier.wait();
        standin_nccl_hold(1);
        submit_all();
        barrier.wait();  // no rank submits to a world that has ended
        const auto begun = std::chrono::steady_clock::now();
        for (DeviceCall& call : calls) {
          EXPECT_NE(wait(context, call.handle(), 30'000).code, PERSEUS_OK);
          EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
        }
        EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(8));
        barrier.wait();
        standin_nccl_hold(0);
      },
      options);
  EXPECT_EQ(standin_nccl_communicators(), 0);
}

// A process set goes while NCCL works for it: another one keeps its communicator.
TEST(NcclFaults, AProcessSetIsRemovedWhileNcclWorks) {
  const std::vector<int> members = {1, 2};
  const auto world = sum_of("world", 3, 20'000);
  const auto some = sum_in_set("some", 3, 1, members, 1000);
  Barrier barrier(3);
  const int before = standin_nccl_calls();
  run_world(kOneHost, 3, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    add_set(context, members);
    DeviceCall first(*world, rank, &gpu);
    ASSERT_EQ(first.submit(context).code, PERSEUS_OK);
    first.finish(context);
    barrier.wait();
    standin_nccl_hold(1);
    std::optional<DeviceCall> call;
    if (rank > 0) {
      ASSERT_EQ(call.emplace(*some, rank, &gpu).submit(context).code, PERSEUS_OK);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    remove_set(context, 1);
    if (rank > 0) {
      EXPECT_NE(wait(context, call->handle(), 30'000).code, PERSEUS_OK);
      EXPECT_EQ(perseus_handle_release(context, call->handle()), PERSEUS_OK);
    }
    barrier.wait();
    standin_nccl_hold(0);
    DeviceCall again(*world, rank, &gpu);
    ASSERT_EQ(again.submit(context).code, PERSEUS_OK);
    again.finish(context);
  });
  EXPECT_EQ(standin_nccl_calls() - before, 3 + 2 + 3);
  EXPECT_EQ(standin_nccl_communicators(), 0);
}

// Nor does it end before the world is gone: what its thread waits for stays.
TEST(NcclFaults, AnAbortOutlivesTheWorld) {
  const auto operation = sum_of("held", 2, 1000);
  Barrier barrier(2);
  run_world(kOneHost, 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    DeviceCall warm(*operation, rank, &gpu), call(*operation, rank, &gpu);
    ASSERT_EQ(warm.submit(context).code, PERSEUS_OK);
    warm.finish(context);
    barrier.wait();
    standin_nccl_hold(1);
    standin_nccl_hold_aborts(1);
    ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
    barrier.wait();  // no rank submits to a world that has ended
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    standin_nccl_break(1);
    EXPECT_NE(wait(context, call.handle(), 30'000).code, PERSEUS_OK);
    EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    barrier.wait();
    standin_nccl_hold(0);  // so that the GPU's streams end
  });
  standin_nccl_break(0);
  EXPECT_EQ(standin_nccl_communicators(), 2);
  standin_nccl_hold_aborts(0);
  while (standin_nccl_communicators() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the thread goes on to its stream
}

// A network fails, as NCCL says, while all ranks live: without a time limit, too, that is not waited for.
TEST(NcclFaults, ANetworkOfNcclFails) {
  hold_a_sum(
      kHosts, {"GLOO_TIMEOUT_SECONDS=0"}, [] { standin_nccl_break(6); },
      [](const Outcome& outcome) { expect_in(outcome, "[nccl] a collective"); });
  EXPECT_EQ(standin_nccl_communicators(), 0);
}

// Another rank's tensor turns out to be on its CPU, and the GPU fails when its own is to be loaded after all.
TEST(NcclFaults, AGpuFailsBeforeItsTensorIsLoaded) {
  const auto operation = sum_of("unloaded", 2, 100'000);
  Barrier barrier(2);
  run_world(kOneHost, 2, [&](int rank, perseus_context* context) {
    if (rank == 1) {
      barrier.wait();
      Call call(*operation, rank);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      const Outcome outcome = wait(context, call.handle(), 30'000);
      EXPECT_NE(outcome.message.find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << outcome.message;
      EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
      barrier.wait();
      return;
    }
    Gpu gpu(0);
    DeviceCall call(*operation, rank, &gpu);
    ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
    gpu.synchronize();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that rank 1 knows of it
    standin_break(700);
    barrier.wait();
    const Outcome outcome = wait(context, call.handle(), 30'000);
    EXPECT_EQ(outcome.code, PERSEUS_IO) << outcome.message;
    EXPECT_NE(outcome.message.find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << outcome.message;
    EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    barrier.wait();
    standin_break(0);
  });
}

// There is no room for the image of a shard: the world ends, and says why.
TEST(NcclFaults, PageLockedMemoryIsUsedUp) {
  const auto operation = sum_of("shard", 4, 100'000);
  WorldOptions options;
  options.overrides = {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=2"};
  Barrier barrier(4);
  run_world(
      kOneHost, 4,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        DeviceCall call(*operation, rank, &gpu);
        if (rank == 0) standin_allow_host_memory(0);
        barrier.wait();
        ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
        const Outcome outcome = wait(context, call.handle(), 30'000);
        EXPECT_NE(outcome.message.find("bytes of page-locked memory: CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos)
            << outcome.message;
        EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
        barrier.wait();
        if (rank == 0) standin_allow_host_memory(1 << 30);
      },
      options);
}

// A rank ends the world while the others' collectives are inside NCCL, or still wait for their turn.
TEST(NcclFaults, TheWorldEndsWhileNcclWorks) {
  std::vector<std::unique_ptr<Operation>> operations;
  for (int i = 0; i < 8; ++i) operations.push_back(sum_of("t" + std::to_string(i), 3, 20'000 + i));
  Barrier barrier(3);
  WorldOptions options;
  options.overrides = {"HOROVOD_FUSION_THRESHOLD=0"};
  run_world(
      kOneHost, 3,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        DeviceCall warm(*operations[0], rank, &gpu);
        ASSERT_EQ(warm.submit(context).code, PERSEUS_OK);
        warm.finish(context);
        barrier.wait();
        standin_nccl_hold(1);
        std::deque<DeviceCall> calls;
        for (const auto& operation : operations) {
          calls.emplace_back(*operation, rank, &gpu);
          ASSERT_EQ(calls.back().submit(context).code, PERSEUS_OK);
        }
        barrier.wait();  // no rank submits to a world that has ended
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        if (rank == 2) standin_nccl_break(3);
        for (DeviceCall& call : calls) {
          const Outcome outcome = wait(context, call.handle(), 30'000);
          EXPECT_NE(outcome.code, PERSEUS_OK);
          EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
        }
        gpu.synchronize();
        barrier.wait();
        standin_nccl_break(0);
        standin_nccl_hold(0);
      },
      options);
  EXPECT_EQ(standin_nccl_communicators(), 0);
}

}  // namespace

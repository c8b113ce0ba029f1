// Tensors that stay on their GPUs until NCCL has summed them, inside a host or everywhere, on stand-ins for the driver
// and for NCCL.
#include "nccl.h"

#include <algorithm>
#include <random>

#include "nccl_ranks.h"

namespace {

using namespace perseus_test;

// Sums that NCCL can do, of sizes from one element to several buckets; among others that it cannot, of every kind.
std::vector<std::unique_ptr<Operation>> sums_and_others(int ranks, const std::vector<perseus_dtype>& dtypes,
                                                        uint64_t seed) {
  std::vector<std::unique_ptr<Operation>> plan;
  const auto name = [&plan] { return "t" + std::to_string(plan.size()); };
  std::vector<int64_t> counts = {1, 77'777, 50'000, 200'003};
  if (thin_grid()) counts.resize(2);
  for (const perseus_dtype dtype : dtypes)
    for (const int64_t count : counts) {
      auto sum =
          std::make_unique<Operation>(PERSEUS_ALLREDUCE, name(), ranks_up_to(ranks),
                                      std::vector<Operation::Tensor>{{dtype, {count}}, {dtype, {count / 2 + 7}}});
      sum->in_place = count % 2 == 1;
      sum->seed = plan.size() + 1;
      // NCCL scales before it sums, which is the same for powers of two alone.
      if (count == 77'777 && ranks != 3) sum->reduction.op = PERSEUS_AVERAGE;
      plan.push_back(std::move(sum));
      plan.push_back(random_operation(seed++, name(), ranks_up_to(ranks), 0, 1 << 16));
    }
  return plan;
}

// Ranks submit all of it at once, in several steps.
void run_steps(const Medium& medium, int ranks, const std::vector<std::unique_ptr<Operation>>& plan,
               const WorldOptions& options = {}) {
  const int blocking = standin_blocking_calls();
  const int calls = with_nccl(
      medium, ranks,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        for (int step = 0; step < 2; ++step) {
          std::deque<DeviceCall> step_calls;
          for (const auto& operation : plan) {
            const Outcome outcome = step_calls.emplace_back(*operation, rank, &gpu).submit(context);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message << "\n" << operation->text();
          }
          for (DeviceCall& call : step_calls) call.finish(context);
        }
      },
      options);
  EXPECT_GT(calls, 0) << "NCCL did nothing";
  EXPECT_EQ(standin_blocking_calls(), blocking) << "the host waited for the GPU";
}

const std::vector<perseus_dtype> kIntegers = {PERSEUS_UINT8, PERSEUS_INT8, PERSEUS_INT32, PERSEUS_INT64};
const std::vector<perseus_dtype> kFloats = {PERSEUS_FLOAT16, PERSEUS_BFLOAT16, PERSEUS_FLOAT32, PERSEUS_FLOAT64};

TEST(Nccl, CollectivesOfOneHostGiveTheBitsOfACpu) {
  for (const auto& dtypes : {kIntegers, kFloats}) {
    for (int ranks = 2; ranks <= 4; ++ranks)
      if (!thin_grid() || ranks == 3) run_steps(kOneHost, ranks, sums_and_others(ranks, dtypes, 100));
    run_steps(all_media()[0], 2, sums_and_others(2, dtypes, 300));
  }
}

// Sums of floats are rounded in another order than those of one host, and products once more: see below.
TEST(Nccl, CollectivesOfTwoHostsGiveTheBitsOfACpu) {
  std::vector<std::unique_ptr<Operation>> plan = sums_and_others(4, kIntegers, 500);
  const auto rounds_more = [](const std::unique_ptr<Operation>& operation) {
    const perseus_reduce_op op = operation->reduction.op;
    return operation->kind == PERSEUS_ALLREDUCE && op != PERSEUS_MIN && op != PERSEUS_MAX &&
           std::any_of(operation->tensors.begin(), operation->tensors.end(),
                       [](const Operation::Tensor& tensor) { return tensor.dtype <= PERSEUS_FLOAT64; });
  };
  plan.erase(std::remove_if(plan.begin(), plan.end(), rounds_more), plan.end());
  run_steps(kOneHost, 4, plan, hosts_of_two());
}

// With every codec, NCCL inside hosts changes no bit: what hosts exchange and hold back is the same. Buckets are large
// and small, and on all streams at once.
TEST(Nccl, GradientsBetweenHostsAreThoseOfTheirMemory) {
  std::vector<int64_t> counts = {7, 70'000, 1, 100'001, 16'384, 999, 300'001, 50'000};
  if (thin_grid()) counts.resize(6);
  const std::vector<std::vector<std::string>> codecs = {
      {"PERSEUS_ALLREDUCE_DTYPE=1"},
      {},
      {"PERSEUS_ALLREDUCE_CODEC=int8"},
      {"PERSEUS_ALLREDUCE_CODEC=int2"},
      {"PERSEUS_ALLREDUCE_CODEC=lossless"},
      {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=1024", "LIGHT_TOPK_WARMUP_STEPS=0"},
      {"PERSEUS_ALLREDUCE_DTYPE=1", "PERSEUS_ALLREDUCE_STREAMS=1", "HOROVOD_FUSION_THRESHOLD=0"},
      {"PERSEUS_ALLREDUCE_DTYPE=1", "PERSEUS_ALLREDUCE_STREAMS=8", "HOROVOD_FUSION_THRESHOLD=65536"},
  };
  for (size_t number = 0; number < codecs.size(); number += thin_grid() ? 2 : 1) {
    const std::vector<std::string>& codec = codecs[number];
    std::string text;
    for (const std::string& setting : codec) text += setting + " ";
    std::vector<std::string> without = codec;
    without.emplace_back("PERSEUS_GPU_OPERATIONS=perseus");
    const perseus_dtype dtypes[] = {PERSEUS_FLOAT32, PERSEUS_FLOAT16, PERSEUS_BFLOAT16, PERSEUS_FLOAT64};
    for (const perseus_dtype dtype : dtypes) {
      if (dtype != PERSEUS_FLOAT32 && (codec != codecs.front() || thin_grid())) continue;
      const Training by_nccl = train(4, counts, hosts_of_two(codec), 2, dtype);
      const Training by_host = train(4, counts, hosts_of_two(without), 2, dtype);
      EXPECT_GT(by_nccl.nccl_calls, 0) << text;
      EXPECT_EQ(by_host.nccl_calls, 0) << text;
      for (size_t rank = 0; rank < 4; ++rank)
        EXPECT_TRUE(by_nccl.results[rank] == by_host.results[rank]) << text << "rank " << rank << " type " << dtype;
    }
  }
}

// A GPU encodes its shard of what NCCL has summed: the bytes are those of its CPU.
TEST(Nccl, GpusEncodeTheirShards) {
  std::vector<int64_t> counts = {7, 70'000, 1, 100'001, 16'384, 999, 300'001, 50'000};
  if (thin_grid()) counts = {70'000, 1, 16'384, 999};
  const std::vector<std::vector<std::string>> codecs = {
      {},
      {"PERSEUS_ALLREDUCE_CODEC=int8"},
      {"PERSEUS_ALLREDUCE_CODEC=int2", "PERSEUS_ALLREDUCE_STREAMS=1", "HOROVOD_FUSION_THRESHOLD=0"},
      {"PERSEUS_ALLREDUCE_CODEC=int4", "PERSEUS_ALLREDUCE_STREAMS=8", "HOROVOD_FUSION_THRESHOLD=65536"},
      {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=0", "LIGHT_TOPK_WARMUP_STEPS=0"},
      {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=70000"},  // the others travel as float16
      {"LIGHT_TOPK_ALLREDUCE=1", "LIGHT_TOPK_THRESHOLD=4096", "PERSEUS_ALLREDUCE_STREAMS=1"},
  };
  for (size_t number = 0; number < codecs.size(); ++number) {
    const std::vector<std::string>& codec = codecs[number];
    // In the last case, a tensor that goes whole keeps the other one of its request on the CPU, in buckets of others.
    const size_t together = number + 1 == codecs.size() ? 2 : 1;
    if (together == 2) counts = {70'000, 7, 50'000, 20'000, 60'000, 999, 16'384, 100'001};
    std::vector<std::string> encoded = codec;
    encoded.emplace_back("PERSEUS_GPU_CODECS=1");
    const std::string text = codec.empty() ? "default" : codec[0];
    const int before = standin_chunk_launches();
    const Training by_cpus = train(4, counts, hosts_of_two(codec), 3, PERSEUS_FLOAT32, together);
    EXPECT_EQ(standin_chunk_launches(), before) << text;
    const int blocking = standin_blocking_calls();
    const Training by_gpus = train(4, counts, hosts_of_two(encoded), 3, PERSEUS_FLOAT32, together);
    EXPECT_EQ(standin_blocking_calls(), blocking) << text << ": the host waited for the GPU";
    EXPECT_GT(standin_chunk_launches(), before) << text;
    EXPECT_GT(by_gpus.nccl_calls, 0) << text;
    for (size_t rank = 0; rank < 4; ++rank)
      EXPECT_TRUE(by_gpus.results[rank] == by_cpus.results[rank]) << text << ", rank " << rank;
  }
}

// Without NCCL's sums the shards go through the host before they are encoded, and so do the results.
TEST(Nccl, GpusEncodeTheirShardsOfWhatTheHostSums) {
  const std::vector<int64_t> counts = {70'000, 999, 16'384};
  const std::vector<std::string> codec = {"PERSEUS_ALLREDUCE_CODEC=int8", "PERSEUS_ALLREDUCE_STREAMS=1"};
  std::vector<std::string> encoded = codec;
  encoded.emplace_back("PERSEUS_GPU_CODECS=1");
  const Training expected = train(4, counts, hosts_of_two(codec));
  const int before = standin_chunk_launches();
  testing::internal::CaptureStderr();
  standin_nccl_fail_init(2);
  const Training refused = train(4, counts, hosts_of_two(encoded));
  standin_nccl_fail_init(0);
  const int between = standin_chunk_launches();
  EXPECT_GT(between, before);
  standin_allow_device_memory(4 * static_cast<int>(counts.size()));  // for the gradients
  const Training full = train(4, counts, hosts_of_two(encoded));
  standin_allow_device_memory(1 << 30);
  testing::internal::GetCapturedStderr();
  EXPECT_GT(standin_chunk_launches(), between);
  EXPECT_EQ(refused.nccl_calls, 0);
  EXPECT_EQ(full.nccl_calls, 0);
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(refused.results[rank] == expected.results[rank]) << "rank " << rank;
    EXPECT_TRUE(full.results[rank] == expected.results[rank]) << "rank " << rank;
  }
}

// Where NCCL has all ranks, hosts make no difference.
TEST(Nccl, SumsBetweenHostsIfAsked) {
  const std::string everywhere = "PERSEUS_GPU_OPERATIONS=nccl";
  WorldOptions options;
  options.overrides = {everywhere};
  run_steps(kOneHost, 4, sums_and_others(4, kIntegers, 700), hosts_of_two({everywhere}));
  run_steps(all_media()[2], 4, sums_and_others(4, kFloats, 800), options);
  const std::vector<int64_t> counts = {7, 70'000, 16'384, 100'001};
  testing::internal::CaptureStderr();
  const Training on_one = train(4, counts, WorldOptions(), 2), on_two = train(4, counts, hosts_of_two({everywhere}), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "nothing is float16";
  EXPECT_GT(on_two.nccl_calls, 0);
  EXPECT_TRUE(on_two.results == on_one.results);
}

// NCCL compresses nothing, so what the user wants compressed does not go there.
TEST(Nccl, LeavesToTheHostsWhatIsToBeCompressed) {
  for (const char* chosen : {"PERSEUS_ALLREDUCE_DTYPE=2", "PERSEUS_ALLREDUCE_CODEC=int8"}) {
    const std::vector<int64_t> counts = {70'000, 50'000};
    const Training asked = train(4, counts, hosts_of_two({chosen, "PERSEUS_GPU_OPERATIONS=nccl"}), 2);
    const Training without = train(4, counts, hosts_of_two({chosen, "PERSEUS_GPU_OPERATIONS=perseus"}), 2);
    EXPECT_EQ(asked.nccl_calls, 0) << chosen;
    EXPECT_TRUE(asked.results == without.results) << chosen;
  }
}

// What auto chooses depends on times, but all ranks end up with the same.
TEST(Nccl, AutoGivesAllRanksTheSame) {
  const Training training =
      train(4, {300'001, 50'000}, hosts_of_two({"PERSEUS_ALLREDUCE_CODEC=auto", "PERSEUS_LINK_GBIT=0.3"}), 6);
  EXPECT_GT(training.nccl_calls, 0);
  for (const Bytes& results : training.results) EXPECT_TRUE(results == training.results[0]);
}

// What NCCL cannot or must not do goes through the host, and is right: codecs inside a host, sums that are looked at.
TEST(Nccl, WhatTheHostHasToSeeGoesThroughItsMemory) {
  for (const std::vector<std::string>& setting :
       std::vector<std::vector<std::string>>{{"PERSEUS_ALLREDUCE_DTYPE=0"},
                                             {"PERSEUS_ALLREDUCE_MODE=1"},  // one rank speaks for its host
                                             {"PERSEUS_ALLREDUCE_CODEC=powersgd", "PERSEUS_POWERSGD_WARMUP_STEPS=0"},
                                             {"PERSEUS_ALLREDUCE_NANCHECK=1"},
                                             {"PERSEUS_ACCUMULATE_N_STEPS=2"}}) {
    std::vector<std::string> without = setting;
    without.emplace_back("PERSEUS_GPU_OPERATIONS=perseus");
    const Training with = train(4, {40'000, 600}, hosts_of_two(setting), 4);
    const Training host = train(4, {40'000, 600}, hosts_of_two(without), 4);
    EXPECT_TRUE(with.results == host.results) << setting[0];
  }
}

// A rank may have a tensor on its CPU in one step and on its GPU in the next.
TEST(Nccl, RanksOnCpusAndGpusMeet) {
  constexpr int kTensors = 6;
  std::vector<std::unique_ptr<Operation>> operations;
  for (int i = 0; i < kTensors; ++i) operations.push_back(sum_of("t" + std::to_string(i), 2, 1000 + 5000 * i, true));
  const int calls = with_nccl(kOneHost, 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    for (int step = 0; step < 8; ++step) {
      std::deque<DeviceCall> on_gpu;
      std::deque<Call> on_cpu;
      for (int i = 0; i < kTensors; ++i) {
        const bool cpu = rank == 1 && step % 4 != 0 && (i + step) % 3 == 0;
        const Operation& operation = *operations[static_cast<size_t>(i)];
        const Outcome outcome = cpu ? on_cpu.emplace_back(operation, rank).submit(context)
                                    : on_gpu.emplace_back(operation, rank, &gpu).submit(context);
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
      }
      for (Call& call : on_cpu) call.finish(context);
      for (DeviceCall& call : on_gpu) call.finish(context);
    }
  });
  EXPECT_GT(calls, 0);
}

// Two ranks on one GPU, which NCCL refuses before 2.30.
TEST(Nccl, RanksOfOneGpuGoThroughTheHost) {
  const bool shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE") != nullptr;
  const auto operation = sum_of("shared", 2, 30'000);
  testing::internal::CaptureStderr();
  ASSERT_EQ(setenv("STANDIN_CUDA_ONE_GPU", "1", 1), 0);
  const int calls = with_nccl(kOneHost, 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    for (int step = 0; step < 3; ++step) {
      DeviceCall call(*operation, rank, &gpu);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      call.finish(context);
    }
  });
  ASSERT_EQ(unsetenv("STANDIN_CUDA_ONE_GPU"), 0);
  const std::string said = testing::internal::GetCapturedStderr();
  if (shares) {
    EXPECT_EQ(calls, 2 * 3);
    EXPECT_EQ(said, "");
    return;
  }
  EXPECT_EQ(calls, 0);
  EXPECT_NE(said.find("NCCL does not join the ranks of this host, whose tensors go through host memory: two ranks use "
                      "the same GPU"),
            std::string::npos)
      << said;
  EXPECT_EQ(said.find("NCCL does not join"), said.rfind("NCCL does not join")) << "said more than once: " << said;
}

TEST(Nccl, ARankThatCannotJoinIsNotWaitedFor) {
  const auto operation = sum_of("unjoined", 2, 30'000);
  testing::internal::CaptureStderr();
  standin_nccl_fail_init(2);
  const int calls = with_nccl(kOneHost, 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    for (int step = 0; step < 3; ++step) {
      DeviceCall call(*operation, rank, &gpu);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      call.finish(context);
    }
  });
  standin_nccl_fail_init(0);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(calls, 0);
  EXPECT_NE(said.find("NCCL does not join the ranks"), std::string::npos) << said;
}

// As where a firewall is between hosts: NCCL itself would try for ever.
TEST(Nccl, AJoinThatNeverEndsIsGivenUp) {
  const auto operation = sum_of("unjoined", 2, 30'000);
  WorldOptions options;
  options.overrides = {"GLOO_TIMEOUT_SECONDS=2", "PERSEUS_GPU_OPERATIONS=nccl"};
  testing::internal::CaptureStderr();
  standin_nccl_fail_init(ncclInProgress);
  const auto sum = [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    DeviceCall call(*operation, rank, &gpu);
    ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
    call.finish(context);
  };
  EXPECT_EQ(with_nccl(all_media()[2], 2, sum, options), 0);
  standin_nccl_fail_init(0);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("NCCL does not join the ranks of all hosts, whose tensors go through host memory: not done "
                      "within half of GLOO_TIMEOUT_SECONDS: see NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO"),
            std::string::npos)
      << said;
}

// One rank has no room for a bucket on its GPU: all do that one in host memory.
TEST(Nccl, MemoryOfAGpuIsUsedUp) {
  const auto small = sum_of("small", 2, 1000), large = sum_of("large", 2, 200'000);
  Barrier barrier(2);
  const int calls = with_nccl(kOneHost, 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    DeviceCall first(*small, rank, &gpu), second(*large, rank, &gpu), third(*small, rank, &gpu);
    ASSERT_EQ(first.submit(context).code, PERSEUS_OK);
    first.finish(context);
    barrier.wait();
    standin_allow_device_memory(0);
    ASSERT_EQ(second.submit(context).code, PERSEUS_OK);
    second.finish(context);
    barrier.wait();
    standin_allow_device_memory(1 << 30);
    ASSERT_EQ(third.submit(context).code, PERSEUS_OK);
    third.finish(context);
  });
  EXPECT_EQ(calls, 2 * 2);
}

// Where that does not change, tensors go the way that they would without NCCL.
TEST(Nccl, AGpuThatIsFullIsLeftToTheFramework) {
  const auto operation = sum_of("large", 2, 200'000);
  testing::internal::CaptureStderr();
  Barrier barrier(2);
  const int calls = with_nccl(kOneHost, 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    std::deque<DeviceCall> sums;
    for (int step = 0; step < 12; ++step) sums.emplace_back(*operation, rank, &gpu);
    for (int step = 0; step < 12; ++step) {
      barrier.wait();
      standin_allow_device_memory(step < 10 ? 0 : 1 << 30);
      barrier.wait();
      DeviceCall& call = sums[static_cast<size_t>(step)];
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      call.finish(context);
    }
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(calls, 0);
  EXPECT_NE(said.find("a GPU has too little memory for NCCL"), std::string::npos) << said;
}

// A rank that has joined gives zeros from its host.
TEST(Nccl, AJoinedRankHasNothingOnItsGpu) {
  constexpr int64_t kCount = 3000;
  with_nccl(kOneHost, 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    DeviceArray data(kCount * sizeof(float));
    for (int step = 0; step < (rank == 0 ? 4 : 2); ++step) {
      gpu.launch([&, step] {
        for (int64_t i = 0; i < kCount; ++i)
          reinterpret_cast<float*>(data.view())[i] = static_cast<float>(i * (rank + 1) + step);
      });
      data.sum(context, gpu, "data", kCount);
      gpu.launch([&, step] {
        const float factor = step < 2 ? 3 : 1, more = static_cast<float>(step < 2 ? 2 * step : step);
        for (int64_t i = 0; i < kCount; ++i)
          ASSERT_EQ(reinterpret_cast<const float*>(data.view())[i], static_cast<float>(i) * factor + more) << step;
      });
      gpu.synchronize();
    }
    perseus_handle joined = 0;
    ASSERT_EQ(submit(context, request_of(PERSEUS_JOIN, "join", nullptr, 0), &joined).code, PERSEUS_OK);
    EXPECT_EQ(wait(context, joined).code, PERSEUS_OK);
    EXPECT_EQ(perseus_handle_release(context, joined), PERSEUS_OK);
  });
}

// Ranks give the work of their process sets to NCCL in one order, whichever they submit first.
TEST(Nccl, ProcessSetsShareGpus) {
  constexpr int kRanks = 4;
  const int steps = thin_grid() ? 5 : 20;
  const std::vector<std::vector<int>> sets = {{0, 1}, {1, 2}, {2, 3}, {0, 3}, {0, 2}, {1, 2, 3}};
  std::vector<std::unique_ptr<Operation>> sums;
  sums.push_back(sum_of("world", kRanks, 40'000));
  size_t members = kRanks;
  for (size_t i = 0; i < sets.size(); ++i) {
    const int64_t count = 1000 + 30'000 * static_cast<int64_t>(i);
    sums.push_back(sum_in_set("set" + std::to_string(i), kRanks, static_cast<int>(i) + 1, sets[i], count));
    members += sets[i].size();
  }
  const int calls = with_nccl(kOneHost, kRanks, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    std::minstd_rand random(static_cast<unsigned>(rank) + 1);
    for (const std::vector<int>& set : sets) add_set(context, set);
    std::vector<const Operation*> own;
    for (const auto& sum : sums)
      if (std::count(sum->members.begin(), sum->members.end(), rank) > 0) own.push_back(sum.get());
    for (int step = 0; step < steps; ++step) {
      std::shuffle(own.begin(), own.end(), random);
      std::deque<DeviceCall> step_calls;
      for (const Operation* sum : own)
        ASSERT_EQ(step_calls.emplace_back(*sum, rank, &gpu).submit(context).code, PERSEUS_OK);
      for (DeviceCall& call : step_calls) call.finish(context);
    }
  });
  EXPECT_EQ(calls, steps * static_cast<int>(members));
}

// Who gives turns has no tensors itself, and submits nothing.
TEST(Nccl, AProcessSetWithoutTheFirstRank) {
  const std::vector<int> members = {1, 2};
  const auto sum = sum_in_set("some", 3, 1, members, 30'000);
  Barrier barrier(3);
  const int calls = with_nccl(kOneHost, 3, [&](int rank, perseus_context* context) {
    add_set(context, members);
    if (rank > 0) {
      Gpu gpu(rank);
      for (int step = 0; step < 3; ++step) {
        DeviceCall call(*sum, rank, &gpu);
        ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
        call.finish(context);
      }
    }
    barrier.wait();
  });
  EXPECT_EQ(calls, 3 * 2);
}

// A communicator goes with its process set, and others go on.
TEST(Nccl, ProcessSetsComeAndGo) {
  const std::vector<int> members = {0, 1};
  const auto world = sum_of("world", 3, 20'000);
  std::vector<std::unique_ptr<Operation>> sums;
  for (int i = 0; i < 4; ++i) sums.push_back(sum_in_set("sum" + std::to_string(i), 3, 1, members, 5'000 * (i + 1)));
  const int calls = with_nccl(kOneHost, 3, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    for (const auto& sum : sums) {
      add_set(context, members);
      DeviceCall all(*world, rank, &gpu);
      ASSERT_EQ(all.submit(context).code, PERSEUS_OK);
      if (rank < 2) {
        DeviceCall some(*sum, rank, &gpu);
        ASSERT_EQ(some.submit(context).code, PERSEUS_OK);
        some.finish(context);
      }
      all.finish(context);
      remove_set(context, 1);  // a number that is free again then
    }
  });
  EXPECT_EQ(calls, 4 * (3 + 2));
}

// A schedule freezes and is left while tensors stay on their GPUs.
TEST(Nccl, ASchedulesBatchesAreRolledBack) {
  std::vector<std::unique_ptr<Operation>> step_operations;
  for (int i = 0; i < 5; ++i) step_operations.push_back(sum_of("s" + std::to_string(i), 2, 2000 + 7000 * i));
  const auto other = sum_of("other", 2, 4000);
  WorldOptions options;
  options.overrides = {"PERSEUS_OFFLINE_NEG=1"};
  const int calls = with_nccl(
      kOneHost, 2,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        uint64_t rounds = 0;
        for (int step = 0; step < 24; ++step) {
          if (step == 6) rounds = stats_of(context).rounds;
          if (step == 7) {
            EXPECT_EQ(stats_of(context).rounds, rounds) << "no schedule";
          }
          std::deque<DeviceCall> calls;
          const bool deviates = step % 8 == 7;
          for (size_t i = 0; i < step_operations.size(); ++i) {
            if (deviates && i == 2) {
              calls.emplace_back(*other, rank, &gpu);
              ASSERT_EQ(calls.back().submit(context).code, PERSEUS_OK);
            }
            if (deviates && i == 3 && rank == 1) continue;
            calls.emplace_back(*step_operations[i], rank, &gpu);
            ASSERT_EQ(calls.back().submit(context).code, PERSEUS_OK);
          }
          if (deviates && rank == 1) {
            calls.emplace_back(*step_operations[3], rank, &gpu);
            ASSERT_EQ(calls.back().submit(context).code, PERSEUS_OK);
          }
          for (DeviceCall& call : calls) call.finish(context);
        }
      },
      options);
  EXPECT_GT(calls, 0);
}

}  // namespace

// Tensors on GPUs: all that a CPU's can do, in the order of streams.
#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <thread>

#include "gpu.h"

namespace {

using namespace perseus_test;

// Every kind, dtype and reduction; ranks on GPUs and CPUs mixed; the legacy stream and others; many at once.
TEST(Cuda, CollectivesGiveTheBitsOfACpu) {
  constexpr int kRanks = 3;
  const int operations = thin_grid() ? 20 : 80;
  for (const Medium& medium : all_media()) {
    std::vector<std::unique_ptr<Operation>> plan;
    for (int i = 0; i < operations; ++i)
      plan.push_back(
          random_operation(static_cast<uint64_t>(i) + 1, "t" + std::to_string(i), ranks_up_to(kRanks), 0, 1 << 18));
    const int blocking = standin_blocking_calls();
    run_world(medium, kRanks, [&](int rank, perseus_context* context) {
      Gpu gpu(rank % 2, rank == 0);
      std::deque<DeviceCall> on_gpu;
      std::deque<Call> on_cpu;
      for (size_t i = 0; i < plan.size(); ++i) {
        // Rank 2 has every third tensor on its CPU.
        const bool cpu = rank == 2 && i % 3 == 0;
        Outcome outcome;
        if (cpu) outcome = on_cpu.emplace_back(*plan[i], rank).submit(context);
        else outcome = on_gpu.emplace_back(*plan[i], rank, &gpu).submit(context);
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message << plan[i]->text();
      }
      for (Call& call : on_cpu) call.finish(context);
      for (DeviceCall& call : on_gpu) call.finish(context);
    });
    EXPECT_EQ(standin_blocking_calls(), blocking) << "the host waited for the GPU";
  }
}

TEST(Cuda, StagingMemoryIsUsedAgain) {
  const auto operation = sum_of("steps", 2, 300'000);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    uint64_t staging = 0;
    for (int step = 0; step < 30; ++step) {
      DeviceCall call(*operation, rank, &gpu);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      call.finish(context);
      const uint64_t now = stats_of(context).staging_bytes;
      if (step == 4) staging = now;  // steps may overlap with the copies of the one before
      if (step > 4) {
        EXPECT_LE(now, staging) << step;
      }
    }
    EXPECT_GE(staging, 300'000 * sizeof(float));
  });
}

// The script waits for its own GPU, too: that is computing, as the search for slow ranks sees it.
TEST(Cuda, ARankWhoseGpuIsSlowIsNamed) {
  const auto operation = sum_of("gradient", 2, 1000);
  WorldOptions options;
  options.overrides = {"PERSEUS_PERF_CHECK_N_STEPS=4", "HOROVOD_LOG_HIDE_TIME=1"};
  testing::internal::CaptureStderr();
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        for (int step = 0; step < 12; ++step) {
          DeviceCall call(*operation, rank, &gpu);
          call.gradient_of = 1;
          const std::chrono::milliseconds computes(rank == 0 ? 1 : 200);
          ASSERT_EQ(call.submit(context, [=] { std::this_thread::sleep_for(computes); }).code, PERSEUS_OK);
          call.finish(context);
        }
        EXPECT_EQ(run(context, request_of(PERSEUS_BARRIER, "end", nullptr, 0)).code, PERSEUS_OK);
      },
      options);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("computing for each: rank 1 "), std::string::npos) << text;
  EXPECT_EQ(text.find("computing for each: rank 0 "), std::string::npos) << text;
}

// The gradients of a step, small and large, ask little of the driver: those of one stream are loaded together, buckets
// are stored as a whole, and requests share events.
TEST(Cuda, AStepAsksTheDriverForLittle) {
  constexpr int kTensors = 161;
  const int steps = thin_grid() ? 3 : 6;
  std::vector<std::unique_ptr<Operation>> step;
  for (int i = 0; i < kTensors; ++i) {
    const int64_t count = i % 3 == 0 ? 64 : 500 + 350 * i;
    step.push_back(sum_of("gradient" + std::to_string(i), 2, count));
  }
  std::atomic<int> least{1 << 30};
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    for (int i = 0; i < steps; ++i) {
      std::deque<DeviceCall> calls;
      const int before = standin_calls();
      for (const auto& operation : step) {
        calls.emplace_back(*operation, rank, &gpu);
        calls.back().gradient_of = 1;
        ASSERT_EQ(calls.back().submit(context).code, PERSEUS_OK);
      }
      for (DeviceCall& call : calls) call.finish(context);
      if (rank == 0) least = std::min(least.load(), standin_calls() - before);
    }
  });
  // One by one, each would take eight calls on each rank: two waits, two copies and three records, and its join.
  EXPECT_LE(least, 2 * 5 * kTensors);
}

// Runs of a tensor begin before all of it has been copied, and are stored while others travel. Encoded or not, the bits
// are those of a CPU.
TEST(Cuda, LargeTensorsTravelInPieces) {
  constexpr int64_t kCount = 5'000'000;
  standin_set_delay(10'000);  // the network is faster than copies
  for (const std::string codec : {"dtype", "int8", "int2"}) {
    if (thin_grid() && codec == "int8") continue;
    WorldOptions options;
    options.overrides = {"PERSEUS_ALLREDUCE_CODEC=" + codec, "PERSEUS_ALLREDUCE_DTYPE=1"};
    run_world(
        {"tcp", "tcp"}, 2,
        [&](int rank, perseus_context* context) {
          Gpu gpu(rank);
          DeviceArray on_gpu(kCount * sizeof(float));
          std::vector<float> on_cpu(kCount), from_gpu(kCount);
          for (int step = 0; step < 2; ++step) {
            fill(PERSEUS_FLOAT32, 7 + static_cast<uint64_t>(step), rank, 0, kCount, on_cpu.data());
            const std::vector<float> values = on_cpu;
            gpu.launch([&] { std::memcpy(on_gpu.view(), values.data(), on_gpu.bytes()); });
            perseus_handle handles[2];
            for (int device = 0; device < 2; ++device) {
              void* data = device == 0 ? on_cpu.data() : on_gpu.pointer();
              perseus_tensor tensor{data, data, &kCount, 1, PERSEUS_FLOAT32};
              perseus_request request = request_of(PERSEUS_ALLREDUCE, device == 0 ? "cpu" : "gpu", &tensor, 1);
              request.gradient_of = 1;
              request.memory = device == 0 ? PERSEUS_HOST : PERSEUS_CUDA;
              request.device = rank;
              request.stream = gpu.stream();
              ASSERT_EQ(submit(context, request, &handles[device]).code, PERSEUS_OK);
            }
            for (perseus_handle handle : handles) {
              const Outcome outcome = wait(context, handle);
              ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
              ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
            }
            gpu.launch([&] { std::memcpy(from_gpu.data(), on_gpu.view(), on_gpu.bytes()); });
            gpu.synchronize();
            EXPECT_EQ(std::memcmp(from_gpu.data(), on_cpu.data(), on_gpu.bytes()), 0) << codec << " step " << step;
            for (perseus_handle handle : handles) EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
          }
        },
        options);
  }
  standin_set_delay(kStandinDelay);
}

// Other ranks do not learn of a tensor before it is computed: they wait where waiting has no time limit.
TEST(Cuda, ARankMayComputeForLongerThanTheTimeLimit) {
  const auto operation = sum_of("late", 2, 1000);
  WorldOptions options;
  options.overrides = {"GLOO_TIMEOUT_SECONDS=1"};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Gpu gpu(0);
        DeviceCall call(*operation, rank, &gpu);
        const auto before = [rank] {
          if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2500));
        };
        ASSERT_EQ(call.submit(context, before).code, PERSEUS_OK);
        call.finish(context);
      },
      options);
}

TEST(Cuda, GradientsAreSummedOverSteps) {
  constexpr int64_t kCount = 5000;
  WorldOptions options;
  options.overrides = {"PERSEUS_ACCUMULATE_N_STEPS=3"};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        DeviceArray gradient(kCount * sizeof(float));
        for (int step = 0; step < 6; ++step) {
          gpu.launch([&, step] {
            float* values = reinterpret_cast<float*>(gradient.view());
            for (int64_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(i % 97 + 1000 * rank + step);
          });
          perseus_tensor tensor{gradient.pointer(), gradient.pointer(), &kCount, 1, PERSEUS_FLOAT32};
          perseus_request request = request_of(PERSEUS_ALLREDUCE, "gradient", &tensor, 1);
          request.gradient_of = 1;
          request.memory = PERSEUS_CUDA;
          request.device = rank;
          request.stream = gpu.stream();
          perseus_handle handle = 0;
          ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
          ASSERT_EQ(wait(context, handle).code, PERSEUS_OK);
          ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK) << perseus_error_message();
          const bool last = step % 3 == 2;
          EXPECT_EQ(perseus_handle_gradient(context, handle), last ? PERSEUS_GRADIENT_REDUCED : PERSEUS_GRADIENT_HELD);
          gpu.launch([&, step, last] {
            const float* values = reinterpret_cast<const float*>(gradient.view());
            for (int64_t i = 0; i < kCount; ++i) {
              const auto one = [&](int r, int s) { return static_cast<float>(i % 97 + 1000 * r + s); };
              float expected = one(rank, step);
              if (last) {
                expected = 0;
                for (int r = 0; r < 2; ++r)
                  for (int s = step - 2; s <= step; ++s) expected += one(r, s);
              }
              ASSERT_EQ(values[i], expected) << "step " << step << " element " << i;
            }
          });
          gpu.synchronize();
          EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
        }
      },
      options);
}

TEST(Cuda, ANanOnOneRankIsFoundOnAll) {
  standin_set_delay(20'000);  // results are on their way when the handle is done
  constexpr int64_t kCount = 3000;
  WorldOptions options;
  options.overrides = {"PERSEUS_ALLREDUCE_NANCHECK=1", "PERSEUS_ALLREDUCE_NANCHECK_ACTION=raise"};
  run_world(
      all_media()[0], 2,
      [&](int rank, perseus_context* context) {
        Gpu gpu(0);
        DeviceArray gradient(kCount * sizeof(float));
        gpu.launch([&] {
          float* values = reinterpret_cast<float*>(gradient.view());
          std::fill_n(values, kCount, 1.0f);
          if (rank == 1) values[2999] = std::numeric_limits<float>::quiet_NaN();
        });
        perseus_tensor tensor{gradient.pointer(), gradient.pointer(), &kCount, 1, PERSEUS_FLOAT32};
        perseus_request request = request_of(PERSEUS_ALLREDUCE, "gradient", &tensor, 1);
        request.gradient_of = 1;
        request.memory = PERSEUS_CUDA;
        request.stream = gpu.stream();
        perseus_handle handle = 0;
        ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
        const Outcome outcome = wait(context, handle);
        EXPECT_EQ(outcome.code, PERSEUS_NAN);
        EXPECT_NE(outcome.message.find("on rank 1"), std::string::npos) << outcome.message;
        // What was on its way has been written before the gradient is used again.
        ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
        gpu.launch([&] { std::memset(gradient.view(), 0, gradient.bytes()); });
        gpu.synchronize();
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        EXPECT_EQ(std::count(gradient.view(), gradient.view() + gradient.bytes(), 0),
                  static_cast<int64_t>(gradient.bytes()));
        EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
      },
      options);
  standin_set_delay(kStandinDelay);
}

// Messages of one tag keep their order, whichever of them come from a GPU or go to one, and however late it is.
TEST(Cuda, MessagesKeepTheirOrder) {
  constexpr int kMessages = 40;
  constexpr int64_t kCount = 3000;
  const auto on_gpu = [](int rank, int message) { return message % 3 != rank; };
  const auto value = [](int message, int64_t i) { return static_cast<int32_t>(message * 10'000 + i); };
  for (const Medium& medium : all_media())
    run_world(medium, 2, [&](int rank, perseus_context* context) {
      Gpu gpu(rank);
      std::deque<DeviceArray> arrays;
      std::vector<std::vector<int32_t>> values(kMessages, std::vector<int32_t>(kCount));
      std::vector<perseus_handle> handles(kMessages);
      for (int m = 0; m < kMessages; ++m) {
        std::vector<int32_t>& host = values[static_cast<size_t>(m)];
        if (rank == 0)
          for (int64_t i = 0; i < kCount; ++i) host[static_cast<size_t>(i)] = value(m, i);
        arrays.emplace_back(kCount * sizeof(int32_t));
        DeviceArray& array = arrays.back();
        void* data = on_gpu(rank, m) ? array.pointer() : host.data();
        if (rank == 0 && on_gpu(rank, m)) gpu.launch([&] { std::memcpy(array.view(), host.data(), array.bytes()); });
        perseus_tensor tensor{data, data, &kCount, 1, PERSEUS_INT32};
        perseus_request request = request_of(rank == 0 ? PERSEUS_SEND : PERSEUS_RECEIVE, nullptr, &tensor, 1);
        request.root = 1 - rank;
        request.tag = 7;
        request.memory = on_gpu(rank, m) ? PERSEUS_CUDA : PERSEUS_HOST;
        request.device = rank;
        request.stream = gpu.stream();
        const Outcome outcome = submit(context, request, &handles[static_cast<size_t>(m)]);
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
      }
      for (int m = 0; m < kMessages; ++m) {
        const perseus_handle handle = handles[static_cast<size_t>(m)];
        const Outcome outcome = wait(context, handle);
        ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
        ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
        std::vector<int32_t>& host = values[static_cast<size_t>(m)];
        const DeviceArray& array = arrays[static_cast<size_t>(m)];
        if (on_gpu(rank, m)) gpu.launch([&] { std::memcpy(host.data(), array.view(), array.bytes()); });
        gpu.synchronize();
        for (int64_t i = 0; i < kCount; ++i)
          ASSERT_EQ(host[static_cast<size_t>(i)], value(m, i)) << "message " << m << " element " << i;
        EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
      }
    });
}

// A join takes its place behind what the rank has submitted, however late that is computed.
TEST(Cuda, AJoinWaitsForTensorsThatAreComputed) {
  constexpr int64_t kCount = 1000;
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    DeviceArray data(kCount * sizeof(float));
    gpu.launch([&] {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (int64_t i = 0; i < kCount; ++i)
        reinterpret_cast<float*>(data.view())[i] = static_cast<float>(i + 100'000 * rank);
    });
    perseus_tensor tensor{data.pointer(), data.pointer(), &kCount, 1, PERSEUS_FLOAT32};
    perseus_request request = request_of(PERSEUS_ALLREDUCE, "data", &tensor, 1);
    request.op = PERSEUS_SUM;
    request.memory = PERSEUS_CUDA;
    request.device = -1;
    request.stream = gpu.stream();
    perseus_handle handle = 0, joined = 0;
    ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
    if (rank == 1) {
      ASSERT_EQ(wait(context, handle).code, PERSEUS_OK);
    }
    ASSERT_EQ(submit(context, request_of(PERSEUS_JOIN, "join", nullptr, 0), &joined).code, PERSEUS_OK);
    for (perseus_handle each : {handle, joined}) {
      const Outcome outcome = wait(context, each);
      ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    }
    ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
    gpu.launch([&] {
      for (int64_t i = 0; i < kCount; ++i)
        ASSERT_EQ(reinterpret_cast<const float*>(data.view())[i], static_cast<float>(2 * i + 100'000));
    });
    gpu.synchronize();
    for (perseus_handle each : {handle, joined}) EXPECT_EQ(perseus_handle_release(context, each), PERSEUS_OK);
  });
}

// A rank that has joined has no tensors, on no device.
TEST(Cuda, AJoinedRankGivesZeros) {
  constexpr int64_t kCount = 2000;
  run_world(all_media()[0], 3, [&](int rank, perseus_context* context) {
    const perseus_request join = request_of(PERSEUS_JOIN, "join", nullptr, 0);
    perseus_handle joined = 0;
    if (rank != 2) {
      Gpu gpu(rank);
      DeviceArray data(kCount * sizeof(float));
      gpu.launch([&] {
        for (int64_t i = 0; i < kCount; ++i)
          reinterpret_cast<float*>(data.view())[i] = static_cast<float>(i * (rank + 1));
      });
      data.sum(context, gpu, "data", kCount);
      gpu.launch([&] {
        for (int64_t i = 0; i < kCount; ++i)
          ASSERT_EQ(reinterpret_cast<const float*>(data.view())[i], static_cast<float>(i * 3));
      });
      gpu.synchronize();
    }
    ASSERT_EQ(submit(context, join, &joined).code, PERSEUS_OK);
    EXPECT_EQ(wait(context, joined).code, PERSEUS_OK);
    EXPECT_EQ(perseus_handle_release(context, joined), PERSEUS_OK);
  });
}

Outcome submitted(perseus_context* context, void* data, int device, void* stream) {
  const int64_t count = 100;
  perseus_tensor tensor{data, data, &count, 1, PERSEUS_FLOAT32};
  perseus_request request = request_of(PERSEUS_ALLREDUCE, "refused", &tensor, 1);
  request.memory = PERSEUS_CUDA;
  request.device = device;
  request.stream = stream;
  perseus_handle handle = 0;
  return submit(context, request, &handle);
}

TEST(Cuda, WhatCannotBeDoneIsRefused) {
  Barrier barrier(2);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    if (rank == 0) {
      Gpu gpu(0);
      const DeviceArray data(400);
      Outcome outcome = submitted(context, data.pointer(), 7, gpu.stream());
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      EXPECT_EQ(outcome.message, "[cuda] a tensor is on GPU 7, but this process sees 4 (CUDA_VISIBLE_DEVICES)");
      EXPECT_EQ(submitted(context, data.pointer(), -2, gpu.stream()).code, PERSEUS_INVALID_ARGUMENT);
      std::vector<float> host(100);
      outcome = submitted(context, host.data(), -1, gpu.stream());
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      EXPECT_EQ(outcome.message, "[cuda] the memory of an array is not that of a GPU");
      ASSERT_EQ(cuStreamBeginCapture_v2(gpu.stream(), 0), 0);
      outcome = submitted(context, data.pointer(), 0, gpu.stream());
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      EXPECT_NE(outcome.message.find("captured into a CUDA graph"), std::string::npos) << outcome.message;
      void* graph = nullptr;
      ASSERT_EQ(cuStreamEndCapture(gpu.stream(), &graph), 0);
    }
    barrier.wait();
  });
}

// Gradients of several threads, each with a stream of its own, change places in one burst while the engine gives
// another to the driver.
TEST(Cuda, ThreadsSubmitFromStreamsOfTheirOwn) {
  constexpr int kThreads = 4, kTensors = 40;
  const auto count = [](int tensor) { return int64_t{100} + 1777 * (tensor % 5); };
  const auto value = [](int rank, int thread, int tensor, int64_t i) {
    return static_cast<float>(1000 * thread + 20 * tensor + 3 * rank + i % 7);
  };
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        Gpu gpu(0);
        std::deque<DeviceArray> arrays;
        std::vector<perseus_handle> handles(kTensors);
        for (int n = 0; n < kTensors; ++n) {
          const int64_t elements = count(n);
          DeviceArray& array = arrays.emplace_back(static_cast<size_t>(elements) * sizeof(float));
          gpu.launch([&array, &value, rank, t, n, elements] {
            float* values = reinterpret_cast<float*>(array.view());
            for (int64_t i = 0; i < elements; ++i) values[i] = value(rank, t, n, i);
          });
          const std::string name = std::to_string(t) + "." + std::to_string(n);
          perseus_tensor tensor{array.pointer(), array.pointer(), &elements, 1, PERSEUS_FLOAT32};
          perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensor, 1);
          request.op = PERSEUS_SUM;
          request.gradient_of = 1 + static_cast<uint64_t>(t);
          request.memory = PERSEUS_CUDA;
          request.stream = gpu.stream();
          ASSERT_EQ(submit(context, request, &handles[static_cast<size_t>(n)]).code, PERSEUS_OK);
        }
        for (int n = 0; n < kTensors; ++n) {
          const perseus_handle handle = handles[static_cast<size_t>(n)];
          const Outcome outcome = wait(context, handle);
          ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
          EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
        }
        gpu.synchronize();
        for (int n = 0; n < kTensors; ++n) {
          const float* sums = reinterpret_cast<const float*>(arrays[static_cast<size_t>(n)].view());
          for (int64_t i = 0; i < count(n); ++i)
            ASSERT_EQ(sums[i], value(0, t, n, i) + value(1, t, n, i)) << "thread " << t << ", tensor " << n;
        }
      });
    for (std::thread& thread : threads) thread.join();
  });
}

// A pipeline's stage waits for another rank on one stream, and that rank waits for what another stream has computed.
TEST(Cuda, NoTensorWaitsForAnotherStream) {
  static constexpr int64_t kCount = 1000;
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    static std::atomic<bool> received{false};
    std::deque<Gpu> gpus;
    std::deque<DeviceArray> arrays;
    perseus_handle handles[2];
    const DeviceArray* of[2];
    const auto value = [](int of_rank, size_t n, int64_t i) {
      return static_cast<float>(100 * static_cast<int>(n) + 7 * of_rank) + static_cast<float>(i % 5);
    };
    const auto give = [&](size_t n, const std::function<void()>& before) {
      Gpu& gpu = gpus.emplace_back(0);
      DeviceArray& array = arrays.emplace_back(static_cast<size_t>(kCount) * sizeof(float));
      of[n] = &array;
      gpu.launch([&array, &value, before, rank, n] {
        before();
        for (int64_t i = 0; i < kCount; ++i) reinterpret_cast<float*>(array.view())[i] = value(rank, n, i);
      });
      perseus_tensor tensor{array.pointer(), array.pointer(), &kCount, 1, PERSEUS_FLOAT32};
      perseus_request request = request_of(PERSEUS_ALLREDUCE, n == 0 ? "late" : "early", &tensor, 1);
      request.op = PERSEUS_SUM;
      request.memory = PERSEUS_CUDA;
      request.stream = gpu.stream();
      ASSERT_EQ(submit(context, request, &handles[n]).code, PERSEUS_OK);
    };
    const auto finish = [&](size_t n) {
      const Outcome outcome = wait(context, handles[n]);
      ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
      ASSERT_EQ(perseus_handle_join(context, handles[n], gpus.front().stream()), PERSEUS_OK);
      EXPECT_EQ(perseus_handle_release(context, handles[n]), PERSEUS_OK);
    };
    const auto nothing = [] {};
    if (rank == 0) {
      give(0, [] {
        while (!received) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
      give(1, nothing);
      finish(1);
    } else {
      give(1, nothing);
      finish(1);
      received = true;
      give(0, nothing);
    }
    finish(0);
    gpus.front().synchronize();
    for (size_t n = 0; n < 2; ++n)
      for (int64_t i = 0; i < kCount; ++i)
        ASSERT_EQ(reinterpret_cast<const float*>(of[n]->view())[i], value(0, n, i) + value(1, n, i)) << n;
  });
}

// By default, a capture ends with an error if any thread calls what might disturb it, such as a question for an event.
TEST(Cuda, AnotherStreamMayBeCapturedMeanwhile) {
  const auto operation = sum_of("beside", 2, 10'000);
  void* context_of_capture = nullptr;
  void* captured = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&context_of_capture, 0), 0);
  ASSERT_EQ(cuCtxPushCurrent_v2(context_of_capture), 0);
  ASSERT_EQ(cuStreamCreateWithPriority(&captured, 1, 0), 0);
  ASSERT_EQ(cuStreamBeginCapture_v2(captured, 0), 0);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    Gpu gpu(rank);
    for (int step = 0; step < 3; ++step) {
      DeviceCall call(*operation, rank, &gpu);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      call.finish(context);
    }
  });
  void* graph = nullptr;
  EXPECT_EQ(cuStreamEndCapture(captured, &graph), 0);
  EXPECT_EQ(cuStreamDestroy_v2(captured), 0);
  EXPECT_EQ(cuCtxPopCurrent_v2(&context_of_capture), 0);
  cuDevicePrimaryCtxRelease_v2(0);
}

// The second submission of a name fails through its handle, because the first one is not known while it is computed.
TEST(Cuda, ANameThatIsInUseFails) {
  const auto operation = sum_of("twice", 2, 100);
  Barrier barrier(2);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    Gpu gpu(0);
    DeviceCall first(*operation, rank, &gpu), second(*operation, rank, &gpu);
    if (rank == 0) {
      ASSERT_EQ(first.submit(context).code, PERSEUS_OK);
      const Outcome submitted = second.submit(context);
      // At once, if the first one is known already.
      const Outcome outcome = submitted.code == PERSEUS_OK ? wait(context, second.handle()) : submitted;
      EXPECT_EQ(outcome.code, PERSEUS_INVALID_ARGUMENT);
      EXPECT_NE(outcome.message.find("with the same name as another tensor"), std::string::npos) << outcome.message;
      if (submitted.code == PERSEUS_OK) {
        EXPECT_EQ(perseus_handle_join(context, second.handle(), gpu.stream()), PERSEUS_OK);
        EXPECT_EQ(perseus_handle_release(context, second.handle()), PERSEUS_OK);
      }
    }
    barrier.wait();
    if (rank == 1) {
      ASSERT_EQ(first.submit(context).code, PERSEUS_OK);
    }
    first.finish(context);
  });
}

}  // namespace

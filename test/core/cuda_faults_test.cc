// GPUs that fail, lack memory or still compute when the world ends: nobody waits for ever.
#include <optional>

#include "base/error.h"
#include "cuda/staging.h"
#include "gpu.h"

namespace {

using namespace perseus;
using namespace perseus_test;

// A GPU that fails ends the world with its own words; other ranks learn them.
TEST(CudaFaults, AnErrorOfTheGpuEndsTheWorld) {
  const auto operation = sum_of("faulty", 2, 1000);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    std::optional<Gpu> gpu;
    if (rank == 0) {
      gpu.emplace(0);
      DeviceCall call(*operation, rank, &*gpu);
      // The kernel before it fails.
      std::atomic<bool> go{false};
      const auto fail_once_told = [&go] {
        while (!go) std::this_thread::yield();
        standin_break(700);
      };
      ASSERT_EQ(call.submit(context, fail_once_told).code, PERSEUS_OK);
      go = true;
      const Outcome outcome = wait(context, call.handle());
      standin_break(0);
      EXPECT_EQ(outcome.code, PERSEUS_IO);
      EXPECT_NE(outcome.message.find("CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)"),
                std::string::npos)
          << outcome.message;
      gpu->synchronize();
      EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    } else {
      Call call(*operation, rank);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      const Outcome outcome = wait(context, call.handle());
      EXPECT_NE(outcome.code, PERSEUS_OK);
      EXPECT_NE(outcome.message.find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << outcome.message;
      EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    }
  });
}

// It fails where the result would be stored, and where a tensor is submitted: nobody waits for ever.
TEST(CudaFaults, AGpuFailsWhileItsTensorTravels) {
  const auto operation = sum_of("travelling", 2, 1000);
  Barrier barrier(2);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    std::optional<Gpu> gpu;
    if (rank == 0) {
      gpu.emplace(0);
      DeviceCall call(*operation, rank, &*gpu);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      gpu->synchronize();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that rank 1 knows of it
      standin_break(700);
      barrier.wait();
      const Outcome outcome = wait(context, call.handle(), 30'000);
      perseus_tensor tensor = *call.request().tensors;
      perseus_request later = call.request();
      later.tensors = &tensor;
      perseus_handle refused = 0;
      EXPECT_NE(submit(context, later, &refused).code, PERSEUS_OK);
      standin_break(0);
      EXPECT_EQ(outcome.code, PERSEUS_IO);
      EXPECT_NE(outcome.message.find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << outcome.message;
      EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    } else {
      barrier.wait();
      Call call(*operation, rank);
      ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
      wait(context, call.handle());  // it may have the sum, or be told why not
      EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    }
  });
}

TEST(CudaFaults, AGpuThatHasFailedTakesNothingMore) {
  const auto operation = sum_of("alone", 1, 1000);
  run_world(all_media()[0], 1, [&](int rank, perseus_context* context) {
    Gpu gpu(0);
    DeviceCall warm(*operation, rank, &gpu), call(*operation, rank, &gpu);
    ASSERT_EQ(warm.submit(context).code, PERSEUS_OK);
    warm.finish(context);
    const perseus_request request = call.request();
    standin_break(700);
    perseus_handle handle = 0;
    const Outcome outcome = submit(context, request, &handle);
    standin_break(0);
    EXPECT_EQ(outcome.code, PERSEUS_IO);
    EXPECT_NE(outcome.message.find("CUDA_ERROR_ILLEGAL_ADDRESS"), std::string::npos) << outcome.message;
  });
}

// The rank that lacks memory says so; it can submit again, and then the job goes on.
TEST(CudaFaults, PageLockedMemoryIsUsedUp) {
  const auto operation = sum_of("memory", 2, 1000);
  Barrier barrier(2);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    Gpu gpu(0);
    DeviceCall call(*operation, rank, &gpu);
    if (rank == 0) {
      standin_allow_host_memory(0);
      const Outcome outcome = call.submit(context);
      standin_allow_host_memory(1 << 30);
      EXPECT_EQ(outcome.code, PERSEUS_IO);
      EXPECT_NE(outcome.message.find("bytes of page-locked memory: CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos)
          << outcome.message;
    }
    barrier.wait();
    ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
    call.finish(context);
  });
}

// What waits for a GPU when the world ends fails at once, and nothing of it is touched while the GPU goes on.
TEST(CudaFaults, TheWorldEndsWhileAGpuComputes) {
  const auto operation = sum_of("pending", 2, 100'000);
  Barrier barrier(2);
  run_world(all_media()[0], 2, [&](int rank, perseus_context* context) {
    if (rank == 1) {
      barrier.wait();
      perseus_context_shutdown(context);
      return;
    }
    Gpu gpu(0);
    DeviceCall call(*operation, rank, &gpu);
    std::atomic<bool> go{false};
    const auto until_told = [&go] {
      while (!go) std::this_thread::yield();
    };
    EXPECT_EQ(call.submit(context, until_told).code, PERSEUS_OK);
    barrier.wait();
    const Outcome end = wait(context, call.handle());
    EXPECT_EQ(end.code, PERSEUS_ABORTED) << end.message;
    EXPECT_EQ(perseus_handle_release(context, call.handle()), PERSEUS_OK);
    go = true;
    gpu.synchronize();
  });
}

// Another library's kernel never ends, and nothing of ours is behind it: freeing memory would wait for it.
TEST(CudaFaults, AKernelThatNeverEndsHoldsNobody) {
  Gpu gpu(0), other(0);
  std::atomic<bool> go{false};
  const auto operation = sum_of("alone", 1, 1000);
  operation->reduction.prescale = 2.0;   // else it is the result
  DeviceCall call(*operation, 0, &gpu);  // whose memory is freed in the end
  const auto begun = std::chrono::steady_clock::now();
  run_world(all_media()[0], 1, [&](int, perseus_context* context) {
    const Gpu of_thread(0);
    ASSERT_EQ(call.submit(context).code, PERSEUS_OK);
    call.finish(context);
    other.launch([&go] {
      while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    perseus_context_shutdown(context);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(30));
  go = true;
}

// A request that waits to be loaded with others, alone.
struct Waiting {
  Waiting(cuda::Device* device, const DeviceArray& array) : staging(std::make_unique<cuda::Staging>(device)) {
    staging->add(array.pointer(), array.bytes(), nullptr, 0, false);
  }
  std::unique_ptr<cuda::Staging> staging;
};

TEST(CudaFaults, ARequestThatGoesIsNotLoadedWithTheOthers) {
  Gpu gpu(0);
  cuda::Device device(0);
  const DeviceArray kept(4096), gone(4096);
  gpu.launch([&] { std::memset(kept.view(), 3, kept.bytes()); });
  Waiting first(&device, kept), second(&device, gone);
  first.staging->load(gpu.stream(), true);
  second.staging->load(gpu.stream(), true);
  EXPECT_FALSE(first.staging->computed());
  second.staging.reset();
  const int before = standin_calls();
  cuda::Staging::launch(&device);
  EXPECT_EQ(standin_calls(), before + 3) << "a wait, one copy and an event";
  first.staging->wait_until_loaded();
  EXPECT_TRUE(first.staging->loaded(0, kept.bytes()));
  EXPECT_EQ(first.staging->in(0)[4095], 3);
}

TEST(CudaFaults, RequestsOfAnotherStreamAreNotWaitedFor) {
  Gpu slow(0), fast(0);
  cuda::Device device(0);
  const DeviceArray late(4096), early(4096);
  std::atomic<bool> go{false};
  slow.launch([&] {
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  fast.launch([&] { std::memset(early.view(), 5, early.bytes()); });
  Waiting first(&device, early), second(&device, late);
  first.staging->load(fast.stream(), true);
  second.staging->load(slow.stream(), true);  // the first is launched before it
  first.staging->wait_until_loaded();
  EXPECT_EQ(first.staging->in(0)[0], 5);
  EXPECT_FALSE(second.staging->computed());
  go = true;
  second.staging->wait_until_loaded();
  EXPECT_TRUE(second.staging->computed());
}

// What is no gradient may be awaited before the stream gets more to do.
TEST(CudaFaults, ARequestAfterWhichNoneFollowsIsLoadedAtOnce) {
  Gpu gpu(0);
  cuda::Device device(0);
  const DeviceArray array(4096);
  Waiting first(&device, array), second(&device, array);
  first.staging->load(gpu.stream(), true);
  const int before = standin_calls();
  second.staging->load(gpu.stream(), false);
  EXPECT_GE(standin_calls() - before, 1 + 3) << "a record; a wait, the copies and an event";
  second.staging->wait_until_loaded();
  EXPECT_TRUE(first.staging->computed());
}

// One handle stands for a stream of each thread.
TEST(CudaFaults, RequestsOfStreamsPerThreadAreNotLoadedTogether) {
  Gpu gpu(0);
  cuda::Device device(0);
  const DeviceArray array(4096);
  void* const per_thread = standin_per_thread_stream();
  Waiting first(&device, array), second(&device, array);
  first.staging->load(per_thread, true);
  const int before = standin_calls();
  second.staging->load(per_thread, true);
  EXPECT_EQ(standin_calls() - before, 3 + 1) << "a wait, a copy and an event of the first; a record of the second";
  second.staging->wait_until_loaded();
  EXPECT_TRUE(first.staging->computed());
}

TEST(CudaFaults, EachRequestOfALaunchThatFailsSaysSo) {
  Gpu gpu(0);
  cuda::Device device(0);
  const DeviceArray array(4096);
  Waiting first(&device, array), second(&device, array), later(&device, array);
  first.staging->load(gpu.stream(), true);
  second.staging->load(gpu.stream(), true);
  standin_break(700);
  cuda::Staging::launch(&device);
  standin_break(0);
  for (const Waiting* request : {&first, &second}) {
    try {
      request->staging->computed();
      FAIL() << "nothing was said";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("an illegal memory access was encountered"), std::string::npos);
    }
    EXPECT_THROW(request->staging->wait_until_loaded(), Error);
  }
  later.staging->load(gpu.stream(), true);
  later.staging->wait_until_loaded();
  EXPECT_TRUE(later.staging->computed());
}

}  // namespace

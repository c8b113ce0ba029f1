// What the core's own kernels do on a GPU, and what a rank alone asks of one.
#include <cstdlib>
#include <random>

#include "cuda/copy_list.h"
#include "cuda/device.h"
#include "gpu.h"

namespace {

using namespace perseus_test;
using perseus::cuda::Copies;
using perseus::cuda::CopyList;
using perseus::cuda::Device;

// Runs of every alignment of both ends, shorter and longer than a word, than a block of threads and than its share.
void expect_copies(Device* device, size_t count) {
  constexpr size_t kRoom = 6 << 20;
  DeviceArray source(kRoom), target(kRoom);
  std::mt19937_64 random(count);
  uint64_t* const words = reinterpret_cast<uint64_t*>(source.view());
  for (size_t i = 0; i < kRoom / sizeof *words; ++i) words[i] = random();
  std::vector<unsigned char> expected(target.view(), target.view() + kRoom);
  const Device::Current current(*device);
  Copies copies;
  size_t from = 0, to = 0;
  for (size_t i = 0; i < count; ++i) {
    constexpr size_t kSizes[] = {1, 3, 4, 16, 60, 1000, 4096, 32 * 1024, 32 * 1024 + 1, 70'000};
    const size_t bytes = kSizes[random() % std::size(kSizes)];
    constexpr size_t kSteps[] = {16, 4, 1};
    const size_t step = kSteps[random() % std::size(kSteps)];
    from = (from + step - 1) / step * step + (step < 16 ? step : 0);
    to = (to + step - 1) / step * step;
    if (std::max(from, to) + bytes > kRoom) break;
    copies.add(static_cast<char*>(target.pointer()) + to, static_cast<char*>(source.pointer()) + from, bytes);
    std::copy_n(source.view() + from, bytes, expected.begin() + static_cast<std::ptrdiff_t>(to));
    from += bytes;
    to += bytes;
  }
  copies.move(*device, device->to_device());
  EXPECT_EQ(copies.bytes(), 0U);
  cuStreamSynchronize(device->to_device());
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), target.view())) << count << " runs";
}

TEST(CudaDevice, ManyRunsTakeOneLaunch) {
  Gpu gpu(0);
  Device device(0);
  ASSERT_TRUE(device.has_kernels()) << device.no_kernels();
  for (const size_t count : {1U, 2U, 7U, CopyList::kMost, CopyList::kMost + 1, 3 * CopyList::kMost})
    expect_copies(&device, count);
  const size_t runs = CopyList::kMost;
  DeviceArray source(runs * 64), target(runs * 64);
  const Device::Current current(device);
  Copies copies;
  for (size_t i = 0; i < runs; ++i)
    copies.add(static_cast<char*>(target.pointer()) + 64 * i, static_cast<char*>(source.pointer()) + 64 * i, 60);
  const int before = standin_calls();
  copies.move(device, device.to_device());
  EXPECT_EQ(standin_calls() - before, 1);
  cuStreamSynchronize(device.to_device());
}

TEST(CudaDevice, ADriverThatCannotHaveKernelsCopiesByItself) {
  ::setenv("STANDIN_CUDA_NO_KERNELS", "1", 1);
  Gpu gpu(0);
  Device device(0);
  ::unsetenv("STANDIN_CUDA_NO_KERNELS");
  EXPECT_FALSE(device.has_kernels());
  EXPECT_EQ(device.no_kernels(), "[cuda] cuModuleLoadData: 218 (an error that this driver does not describe)");
  expect_copies(&device, 200);
}

// Of one rank: the result is there for the stream, in its order, without the host's memory, and before the stream gets
// to it.
TEST(CudaDevice, ARankAloneLeavesItsTensorsWhereTheyAre) {
  constexpr int64_t kCount = 70'000;
  for (const bool legacy : {false, true})
    run_world(all_media()[0], 1, [&](int, perseus_context* context) {
      Gpu gpu(0, legacy);
      DeviceArray in(kCount * sizeof(float)), out(kCount * sizeof(float)), more(kCount * sizeof(float));
      int round = 0;
      for (const perseus_kind kind : {PERSEUS_ALLREDUCE, PERSEUS_BROADCAST})
        for (const perseus_reduce_op op : {PERSEUS_SUM, PERSEUS_AVERAGE, PERSEUS_MIN, PERSEUS_ADASUM})
          for (const bool in_place : {false, true}) {
            std::atomic<bool> go{false};
            const float first = 3.0F * static_cast<float>(++round);
            gpu.launch([&] {
              while (!go) std::this_thread::yield();
              float* values = reinterpret_cast<float*>(in.view());
              for (int64_t i = 0; i < kCount; ++i) values[i] = first + static_cast<float>(i % 1000);
            });
            const perseus_tensor tensors[] = {
                {in.pointer(), in_place ? in.pointer() : out.pointer(), &kCount, 1, PERSEUS_FLOAT32},
                {in.pointer(), in_place ? in.pointer() : more.pointer(), &kCount, 1, PERSEUS_FLOAT32}};
            perseus_request request = request_of(kind, "alone", tensors, 2);
            request.op = op;
            request.memory = PERSEUS_CUDA;
            request.stream = gpu.stream();
            perseus_handle handle = 0;
            ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
            EXPECT_EQ(perseus_handle_poll(context, handle), 1) << "it waits for the GPU";
            ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
            std::vector<float> found(2 * kCount);
            gpu.launch([&] {
              const unsigned char* const firsts = in_place ? in.view() : out.view();
              const unsigned char* const seconds = in_place ? in.view() : more.view();
              std::memcpy(found.data(), firsts, in.bytes());
              std::memcpy(found.data() + kCount, seconds, in.bytes());
            });
            go = true;
            gpu.synchronize();
            for (int64_t i = 0; i < 2 * kCount; ++i)
              ASSERT_EQ(found[i], first + static_cast<float>(i % kCount % 1000)) << kind << " " << op << " " << i;
            EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
          }
      EXPECT_EQ(stats_of(context).staging_bytes, 0U);
    });
}

// Whoever waits on another stream than the one that has computed the tensor.
TEST(CudaDevice, ARankAlonesResultIsThereForAnyStream) {
  constexpr int64_t kCount = 1000;
  run_world(all_media()[0], 1, [&](int, perseus_context* context) {
    Gpu gpu(0), other(0);
    for (const bool in_place : {false, true}) {
      DeviceArray in(kCount * sizeof(float)), out(kCount * sizeof(float));
      std::atomic<bool> go{false}, early{false};
      gpu.launch([&] {
        while (!go) std::this_thread::yield();
        std::fill_n(reinterpret_cast<float*>(in.view()), kCount, 5.0F);
      });
      const perseus_tensor tensor{in.pointer(), in_place ? in.pointer() : out.pointer(), &kCount, 1, PERSEUS_FLOAT32};
      perseus_request request = request_of(PERSEUS_ALLREDUCE, "elsewhere", &tensor, 1);
      request.op = PERSEUS_SUM;
      request.memory = PERSEUS_CUDA;
      request.stream = gpu.stream();
      perseus_handle handle = 0;
      ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
      ASSERT_EQ(perseus_handle_join(context, handle, other.stream()), PERSEUS_OK);
      EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
      float found = 0;
      other.launch([&] {
        early = !go;
        found = reinterpret_cast<float*>(in_place ? in.view() : out.view())[kCount - 1];
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      go = true;
      other.synchronize();
      EXPECT_FALSE(early);
      EXPECT_EQ(found, 5.0F);
      gpu.synchronize();
    }
  });
}

// What changes the tensor, or looks at it, takes the usual way.
TEST(CudaDevice, ARankAloneScalesAndLooks) {
  constexpr int64_t kCount = 1000;
  WorldOptions options;
  options.overrides = {"PERSEUS_ALLREDUCE_NANCHECK=1", "PERSEUS_ALLREDUCE_NANCHECK_ACTION=raise"};
  run_world(
      all_media()[0], 1,
      [&](int, perseus_context* context) {
        Gpu gpu(0);
        DeviceArray data(kCount * sizeof(float));
        float* const values = reinterpret_cast<float*>(data.view());
        std::fill_n(values, kCount, 3.0F);
        const perseus_tensor tensor{data.pointer(), data.pointer(), &kCount, 1, PERSEUS_FLOAT32};
        perseus_request request = request_of(PERSEUS_ALLREDUCE, "scaled", &tensor, 1);
        request.op = PERSEUS_SUM;
        request.postscale = 0.5;
        request.memory = PERSEUS_CUDA;
        request.stream = gpu.stream();
        for (const bool nan : {false, true}) {
          perseus_handle handle = 0;
          if (nan) {
            request.postscale = 1.0;
            request.gradient_of = 1;
            values[17] = std::numeric_limits<float>::quiet_NaN();
          }
          ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
          EXPECT_EQ(wait(context, handle).code, nan ? PERSEUS_NAN : PERSEUS_OK);
          ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
          gpu.synchronize();
          EXPECT_EQ(values[500], 1.5F);
          EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
        }
        // An integer is no gradient, wherever it lies.
        perseus_tensor integer = tensor;
        integer.dtype = PERSEUS_INT32;
        request.tensors = &integer;
        request.name = "integer";
        perseus_handle handle = 0;
        EXPECT_EQ(submit(context, request, &handle).code, PERSEUS_INVALID_ARGUMENT);
        void* graph = nullptr;
        ASSERT_EQ(cuStreamBeginCapture_v2(gpu.stream(), 0), 0);
        request.tensors = &tensor;
        request.gradient_of = 0;
        const Outcome refused = submit(context, request, &handle);
        EXPECT_EQ(refused.code, PERSEUS_INVALID_ARGUMENT);
        EXPECT_NE(refused.message.find("captured into a CUDA graph"), std::string::npos) << refused.message;
        ASSERT_EQ(cuStreamEndCapture(gpu.stream(), &graph), 0);
      },
      options);
}

}  // namespace

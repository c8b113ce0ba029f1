// A GPU as a framework uses it, on the stand-in for NVIDIA's driver: a host that touches its memory or does not wait
// for a stream is found.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "cuda_driver.h"
#include "operation.h"

namespace perseus_test {

// A GPU as a framework uses it: its context is current, and a stream has all work.
class Gpu {
 public:
  explicit Gpu(int device, bool legacy = false) : device_(device) {
    void* context = nullptr;
    EXPECT_EQ(cuDevicePrimaryCtxRetain(&context, device), 0);
    EXPECT_EQ(cuCtxPushCurrent_v2(context), 0);
    if (!legacy) {
      EXPECT_EQ(cuStreamCreateWithPriority(&stream_, 1, 0), 0);
    }
  }
  ~Gpu() {
    synchronize();
    if (stream_ != nullptr) cuStreamDestroy_v2(stream_);
    void* context = nullptr;
    EXPECT_EQ(cuCtxPopCurrent_v2(&context), 0);
    cuDevicePrimaryCtxRelease_v2(device_);
  }
  int device() const { return device_; }
  void* stream() const { return stream_; }
  // What a kernel would do, after all that the stream has to do before.
  void launch(std::function<void()> kernel) {
    const auto run = [](void* work) {
      const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(work));
      (*owned)();
    };
    EXPECT_EQ(cuLaunchHostFunc(stream_, run, new std::function<void()>(std::move(kernel))), 0);
  }
  void synchronize() { cuStreamSynchronize(stream_); }

 private:
  const int device_;
  void* stream_ = nullptr;
};

// Memory of a GPU, of which the host sees the address only.
class DeviceArray {
 public:
  explicit DeviceArray(size_t bytes) : bytes_(bytes) { EXPECT_EQ(cuMemAlloc_v2(&address_, bytes), 0); }
  ~DeviceArray() { EXPECT_EQ(cuMemFree_v2(address_), 0); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  void* pointer() const { return reinterpret_cast<void*>(address_); }
  unsigned char* view() const { return static_cast<unsigned char*>(standin_view(address_)); }
  size_t bytes() const { return bytes_; }
  // Sums its float32 elements with those of other ranks, in the order of the GPU's stream.
  void sum(perseus_context* context, const Gpu& gpu, const char* name, int64_t count) {
    perseus_tensor tensor{pointer(), pointer(), &count, 1, PERSEUS_FLOAT32};
    perseus_request request = request_of(PERSEUS_ALLREDUCE, name, &tensor, 1);
    request.op = PERSEUS_SUM;
    request.memory = PERSEUS_CUDA;
    request.device = gpu.device();
    request.stream = gpu.stream();
    perseus_handle handle = 0;
    ASSERT_EQ(submit(context, request, &handle).code, PERSEUS_OK);
    const Outcome outcome = wait(context, handle);
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
    ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
    EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
  }

 private:
  const size_t bytes_;
  unsigned long long address_ = 0;
};

// A call whose tensors are computed by a stream, and whose results a stream reads.
class DeviceCall : public Call {
 public:
  DeviceCall(const Operation& operation, int rank, Gpu* gpu) : Call(operation, rank), gpu_(*gpu) {
    const perseus_request plain = Call::request();
    for (size_t i = 0; i < tensors(); ++i) {
      perseus_tensor tensor = plain.tensors[i];
      in_.push_back(std::make_unique<DeviceArray>(input(i).size()));
      tensor.input = in_[i]->pointer();
      if (!operation.in_place) out_.push_back(std::make_unique<DeviceArray>(output(i).size()));
      if (tensor.output != nullptr) tensor.output = result(i).pointer();
      tensors_on_gpu_.push_back(tensor);
    }
  }

  ~DeviceCall() { gpu_.synchronize(); }
  uint64_t gradient_of = 0;

  perseus_request request() const {
    perseus_request r = Call::request();
    r.tensors = tensors_on_gpu_.data();
    r.memory = PERSEUS_CUDA;
    r.device = gpu_.device();
    r.stream = gpu_.stream();
    r.gradient_of = gradient_of;
    return r;
  }
  // `before`: what the stream does first.
  Outcome submit(perseus_context* context, std::function<void()> before = nullptr) {
    if (before) gpu_.launch(std::move(before));
    for (size_t i = 0; i < tensors(); ++i)
      gpu_.launch([this, i] {
        std::copy(input(i).begin(), input(i).end(), in_[i]->view());
        if (!operation().in_place) std::copy(output(i).begin(), output(i).end(), result(i).view());
      });
    return perseus_test::submit(context, request(), handle_place());
  }
  void finish(perseus_context* context) {
    const Outcome outcome = wait(context, handle());
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message << "\n" << operation().text();
    EXPECT_EQ(perseus_handle_join(context, handle(), gpu_.stream()), PERSEUS_OK) << perseus_error_message();
    for (size_t i = 0; i < tensors(); ++i)
      gpu_.launch([this, i] { std::copy_n(result(i).view(), output(i).size(), output(i).begin()); });
    gpu_.synchronize();
    Call::finish(context);
  }

 private:
  DeviceArray& result(size_t i) { return operation().in_place ? *in_[i] : *out_[i]; }

  Gpu& gpu_;
  std::vector<std::unique_ptr<DeviceArray>> in_, out_;
  std::vector<perseus_tensor> tensors_on_gpu_;
};

inline std::unique_ptr<Operation> sum_of(const std::string& name, int ranks, int64_t count, bool in_place = false) {
  auto made = std::make_unique<Operation>(PERSEUS_ALLREDUCE, name, ranks_up_to(ranks),
                                          std::vector<Operation::Tensor>{{PERSEUS_FLOAT32, {count}}});
  made->in_place = in_place;
  return made;
}

// Adds the process set of these ranks; those of a world get the numbers 1, 2, ...
inline void add_set(perseus_context* context, const std::vector<int>& ranks) {
  perseus_request add = request_of(PERSEUS_ADD_GROUP, "add", nullptr, 0);
  add.ranks = ranks.data();
  add.rank_count = static_cast<int>(ranks.size());
  ASSERT_EQ(run(context, add).code, PERSEUS_OK);
}

inline void remove_set(perseus_context* context, int number) {
  perseus_request remove = request_of(PERSEUS_REMOVE_GROUP, "remove", nullptr, 0);
  remove.ranks = &number;
  remove.rank_count = 1;
  ASSERT_EQ(run(context, remove).code, PERSEUS_OK);
}

inline std::unique_ptr<Operation> sum_in_set(const std::string& name, int ranks, int number,
                                             const std::vector<int>& members, int64_t count) {
  auto sum = sum_of(name, ranks, count);
  sum->members = members;
  sum->group = number;
  return sum;
}

}  // namespace perseus_test

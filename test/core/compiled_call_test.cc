// A collective in a program of XLA that runs out of memory is an error on every rank, and nothing waits for it.
#include "compiled_call.h"

#include <dlfcn.h>

#include <cstdlib>

#include "world.h"
#include "world/world.h"

namespace {

std::atomic<size_t> most_bytes{SIZE_MAX};

}  // namespace

// In the place of glibc's.
extern "C" void* aligned_alloc(size_t alignment, size_t size) {
  using Function = void* (*)(size_t, size_t);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "aligned_alloc"));
  return size > most_bytes ? nullptr : real(alignment, size);
}

// Of plan.cc, which needs TensorFlow.
namespace perseus::tensorflow::xla {

size_t bytes_of(perseus_dtype, const std::vector<int64_t>& shape) { return static_cast<size_t>(shape[0]) * 4; }
const char* label_of(perseus_kind) { return "HorovodOp"; }

}  // namespace perseus::tensorflow::xla

namespace {

using namespace perseus_test;
using namespace perseus::tensorflow::xla;

constexpr int64_t kCount = 1 << 20;

class OutOfMemory : public testing::TestWithParam<perseus_kind> {};

TEST_P(OutOfMemory, IsAnErrorOnEveryRankAndTheJobGoesOn) {
  const perseus_kind kind = GetParam();
  run_world(all_media()[0], 2, [kind](int rank, perseus_context* context) {
    std::vector<float> data(kCount, static_cast<float>(rank + 1)), result(kCount);
    const int64_t shape[] = {kCount};
    const perseus_tensor tensor{data.data(), kind == PERSEUS_ALLGATHER ? nullptr : result.data(), shape, 1,
                                PERSEUS_FLOAT32};
    const perseus_request request = request_of(kind, "t", &tensor, 1);
    if (rank == 0) {
      perseus::attach_world(context);
      Plan plan;
      plan.kind = kind;
      plan.name = "t";
      plan.tensors = {{PERSEUS_FLOAT32, {kCount}, {2 * kCount}}};
      const void* inputs[] = {data.data()};
      // Of a reduce-scatter the input has room, and the result, which is said to be larger here, has not.
      most_bytes = kind == PERSEUS_REDUCESCATTER ? sizeof(float) * kCount + 64 : sizeof(float);
      Failure failure;
      CompiledCall* call = CompiledCall::start(plan, inputs, &failure);
      most_bytes = SIZE_MAX;
      ASSERT_NE(call, nullptr) << failure.text;
      std::mutex mutex;
      std::condition_variable ended;
      std::string text;
      call->when_done([&](const Failure* why) {
        const std::lock_guard<std::mutex> lock(mutex);
        text = why == nullptr ? "no failure" : std::to_string(why->code) + " " + why->text;
        ended.notify_all();
      });
      std::unique_lock<std::mutex> lock(mutex);
      ended.wait(lock, [&] { return !text.empty(); });
      EXPECT_EQ(text, "8 HorovodOp: out of memory for 't': make batches or the model smaller");
      perseus::detach_world();
    } else {
      const Outcome outcome = run(context, request);
      EXPECT_EQ(outcome.code, PERSEUS_MISMATCH);
      EXPECT_NE(outcome.message.find("out of memory for 't'"), std::string::npos) << outcome.message;
    }
    EXPECT_EQ(run(context, request).code, PERSEUS_OK) << perseus_error_message();
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, OutOfMemory,
                         testing::Values(PERSEUS_ALLREDUCE, PERSEUS_ALLGATHER, PERSEUS_REDUCESCATTER));

}  // namespace

// The functions that Python calls through ctypes. None of them needs the GIL. Functions that can fail return 0, or -1
// with the text in perseus_mxnet_error().
#include <cstring>
#include <string>

#include "gathered.h"

namespace {

using namespace perseus::mxnet;

thread_local std::string last_error;

// Calls that are pushed together form one op of the engine up to this size: running a small op takes as long as
// reducing it.
constexpr size_t kBytesTogether = size_t{1} << 20;

void push_all(const perseus_mxnet_op* ops, int count) {
  std::vector<std::unique_ptr<Call>> calls;
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) {
    calls.push_back(std::make_unique<Call>(ops[i]));
    bytes += calls.back()->bytes();
    const bool is_last = i + 1 == count;
    if (bytes < kBytesTogether && !is_last) continue;
    EngineOp::push(std::make_shared<EngineOp>(std::move(calls)), is_last && count > 1);
    calls.clear();
    bytes = 0;
  }
}

template <typename Function>
int guarded(const Function& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

}  // namespace

extern "C" {

// Describes the calling thread's last failed call.
PERSEUS_EXPORT const char* perseus_mxnet_error() { return last_error.c_str(); }

// Called once, before everything else, with dlopen's handle of MXNet's library.
PERSEUS_EXPORT int perseus_mxnet_load(void* library) {
  return guarded([library] {
    const char* missing = nullptr;
    if (!load_api(library, &missing)) throw std::runtime_error(missing);
  });
}

// Ops go to this context until perseus_mxnet_detach.
PERSEUS_EXPORT void perseus_mxnet_attach(perseus_context* context) { perseus::attach_world(context); }

// After perseus_context_shutdown and before perseus_context_destroy: blocks until no op uses the context.
PERSEUS_EXPORT void perseus_mxnet_detach() { perseus::detach_world(); }

// Pushes ops of one kind with given outputs. If one fails, earlier ones may be under way.
PERSEUS_EXPORT int perseus_mxnet_push(const perseus_mxnet_op* ops, int count) {
  return guarded([ops, count] { push_all(ops, count); });
}

// Runs an op without outputs, and waits for it. Returns 1, without results, if an input has an error, which a wait for
// that input raises.
PERSEUS_EXPORT int perseus_mxnet_gather(const perseus_mxnet_op* op, Gathered** gathered) {
  int skipped = 0;
  const int status = guarded([op, gathered, &skipped] {
    auto made = std::make_unique<Gathered>(*op);
    skipped = made->skipped() ? 1 : 0;
    if (skipped == 0) *gathered = made.release();
  });
  return status != 0 ? status : skipped;
}

// The numbers live as long as `gathered`. splits: of alltoall, the rows that came from each rank.
PERSEUS_EXPORT int perseus_mxnet_gathered_describe(const Gathered* gathered, int index, int* dims,
                                                   const int64_t** shape, int* split_count, const int64_t** splits) {
  return guarded([=] {
    const perseus_output output = gathered->output(index);
    *dims = output.ndim;
    *shape = output.shape;
    *split_count = output.received_split_count;
    *splits = output.received_splits;
  });
}

// Copies a result into a new array of its shape, which no op uses yet.
PERSEUS_EXPORT int perseus_mxnet_gathered_copy(const Gathered* gathered, int index, NDArray array) {
  return guarded([=] {
    const perseus_output output = gathered->output(index);
    void* data = nullptr;
    if (output.size == 0) return;
    if (api().data(array, &data) != 0) throw std::runtime_error(api().last_error());
    std::memcpy(data, output.data, output.size);
  });
}

PERSEUS_EXPORT void perseus_mxnet_gathered_free(Gathered* gathered) { delete gathered; }

}  // extern "C"

// The functions that Python calls through ctypes. None of them needs the GIL. Functions that can fail return 0, or -1
// with the text in perseus_mxnet_error().
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gathered.h"

namespace {

using namespace perseus::mxnet;

thread_local std::string last_error;

// Calls that are pushed together form one op of the engine up to this size: running a small op takes as long as
// reducing it.
constexpr size_t kBytesTogether = size_t{1} << 20;

// Calls for one op. They start together, while the engine orders ops that use the same memory.
class Together {
 public:
  bool empty() const { return calls_.empty(); }
  bool is_full() const { return bytes_ >= kBytesTogether; }
  // Does the call write what another one uses, or use what another one writes?
  bool must_precede(const Call& call) const {
    bool found = false;
    call.each_written([&](NDArray array) { found = found || is_in(written_, array) || is_in(read_, array); });
    call.each_read([&](NDArray array, bool) { found = found || is_in(written_, array); });
    return found;
  }

  void add(std::unique_ptr<Call> call) {
    call->each_written([&](NDArray array) { written_.push_back(chunk_of(array)); });
    call->each_read([&](NDArray array, bool) { read_.push_back(chunk_of(array)); });
    bytes_ += call->bytes();
    calls_.push_back(std::move(call));
  }

  void push(bool at_last) {
    EngineOp::push(std::make_shared<EngineOp>(std::move(calls_)), at_last);
    *this = Together();
  }

 private:
  static bool is_in(const std::vector<void*>& chunks, NDArray array) {
    return std::find(chunks.begin(), chunks.end(), chunk_of(array)) != chunks.end();
  }

  std::vector<std::unique_ptr<Call>> calls_;
  std::vector<void*> written_, read_;
  size_t bytes_ = 0;
};

void push_all(const perseus_mxnet_op* ops, int count) {
  Together together;
  for (int i = 0; i < count; ++i) {
    auto call = std::make_unique<Call>(ops[i]);
    if (together.is_full() || together.must_precede(*call)) together.push(false);
    together.add(std::move(call));
  }
  if (!together.empty()) together.push(count > 1);
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

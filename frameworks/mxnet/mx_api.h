// The part of MXNet's C API that Perseus uses, looked up in the library that the process has loaded. Constant once
// loaded.
//
// The same in MXNet 1.9. Source: mxnet/{c_api,engine,ndarray}.h.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace perseus::mxnet {

using NDArray = void*;

// A function of the engine: the engine's run context, the completion, its own argument.
using AsyncFunction = void (*)(void* run_context, void* on_complete, void* argument);
using SyncFunction = void (*)(void* run_context, void* argument);
using Deleter = void (*)(void* argument);

struct Api {
  const char* (*last_error)();
  int (*push_async)(AsyncFunction, void* argument, Deleter, const void* device, const NDArray* read, int read_count,
                    const NDArray* written, int written_count, const void* property, int priority, const char* name,
                    bool wait);
  int (*push_sync)(SyncFunction, void* argument, Deleter, const void* device, const NDArray* read, int read_count,
                   const NDArray* written, int written_count, const void* property, int priority, const char* name);
  int (*shallow_copy)(NDArray array, NDArray* copy);
  int (*free_array)(NDArray array);
  // The numbers belong to the calling thread until its next call.
  int (*shape)(NDArray array, int* dims, const int64_t** shape);
  int (*dtype)(NDArray array, int* dtype);
  // For an array in oneDNN's layout this waits for the engine; within one of the engine's functions it never returns.
  int (*data)(NDArray array, void** data);
  // Converts the memory (see chunk_of) back to rows and columns, in place. Does nothing if it has that layout, as all
  // memory has in a build without oneDNN.
  void (*reorder)(void* chunk);
};

// False if a function is missing, with its name in `missing`.
bool load_api(void* library, const char** missing);
const Api& api();

// Where an array's memory and its variable of the engine live, shared by its views: NDArray's first member points
// there.
inline void* chunk_of(NDArray array) { return *static_cast<void**>(array); }

// mxnet::Context, of the CPU.
struct Device {
  int type = 1;
  int index = 0;
};
// mxnet::FnProperty. Ops with a queue of their own start in time despite heavy computations.
inline constexpr int kPrioritized = 3;

// The dtypes in Python's arrays, see mshadow/base.h.
enum Dtype : int {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kUint8 = 3,
  kInt32 = 4,
  kInt8 = 5,
  kInt64 = 6,
  kBool = 7,
  kBfloat16 = 12,
};

// mxnet::engine::CallbackOnComplete, which has no C API: copy it within the call that passes it, and run it once.
struct Completion {
  void (*callback)(void* engine, void* operation, const std::runtime_error* error);
  void* engine;
  void* operation;

  // The op's outputs raise the error, if there is one, at the next wait for them. dmlc::Error has no members of its
  // own, so MXNet may take it for one.
  void run(const std::runtime_error* error) const { callback(engine, operation, error); }
};

}  // namespace perseus::mxnet

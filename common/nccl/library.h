// NVIDIA's NCCL, opened at run time, from where frameworks have it: nothing is compiled or linked against it. Types are
// those of its stable API. Any thread.
#pragma once

#include <string>

#include "base/dtype.h"

namespace perseus::nccl {

using Result = int;    // ncclResult_t
using Handle = void*;  // ncclComm_t, cudaStream_t

constexpr Result kSuccess = 0, kInternalError = 3, kRemoteError = 6, kInProgress = 7;
constexpr int kSum = 0, kAverage = 4;  // ncclRedOp_t

// What the members of a communicator find each other by.
struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as of NCCL 2.18: what later versions have added, keeps its default.
struct CommunicatorConfig {
  static constexpr int kUndefined = -2147483647 - 1;

  size_t size = sizeof(CommunicatorConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cluster_size = kUndefined, least_blocks = kUndefined, most_blocks = kUndefined;
  const char* network = nullptr;
  int split_share = kUndefined;
};

struct Functions {
  Result (*version)(int* version);
  const char* (*error_text)(Result code);
  const char* (*last_error)(Handle communicator);
  Result (*unique_id)(UniqueId* id);
  Result (*join)(Handle* communicator, int members, UniqueId id, int me, CommunicatorConfig* config);
  Result (*state)(Handle communicator, Result* state);
  Result (*abort)(Handle communicator);
  Result (*allreduce)(const void* in, void* out, size_t count, int type, int op, Handle communicator, Handle stream);
  Result (*reduce_scatter)(const void* in, void* out, size_t count, int type, int op, Handle communicator,
                           Handle stream);
  Result (*allgather)(const void* in, void* out, size_t count, int type, Handle communicator, Handle stream);
};

class Library {
 public:
  // The process's: `wanted` (PERSEUS_NCCL_LIBRARY) if it is not empty, else the one that is loaded already, the one of
  // pip beside us, or any that the loader finds. Later calls give what the first one that succeeded has found. Throws
  // Error(kIo) where there is none, where it is too old or told to block, and says what to do.
  static const Library& get(const std::string& wanted);

  const Functions& call() const { return functions_; }
  int version() const { return version_; }  // 22304 = NCCL 2.23.4
  const std::string& path() const { return path_; }
  // Must each communicator be called from a thread of its own? See CallThread.
  bool wants_threads() const { return version_ < 22800; }
  // Throws Error(kIo) with NCCL's own words unless the code is a success, or work that goes on. `what` failed.
  void check(Result code, const char* what, Handle communicator) const;
  std::string text_of(Result code, Handle communicator) const;

 private:
  explicit Library(const std::string& wanted);

  std::string path_;
  void* library_ = nullptr;  // stays open: frameworks use it, too
  Functions functions_{};
  int version_ = 0;
};

// From now on NCCL connects the ranks of a communicator while it joins them. Since 2.22 it has done so in their first
// collective, whose failure would come too late for doing without NCCL. No effect once NCCL has joined ranks in this
// process, or where NCCL_RUNTIME_CONNECT is set.
void connect_when_joining();

// NCCL's number for a type, negative where it has none. It adds floating types as Perseus does, but in another order.
int type_of(DType dtype);

}  // namespace perseus::nccl

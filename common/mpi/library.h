// The MPI library of this process, opened at run time: Open MPI's and MPICH's share names and differ in their handles.
// Nothing is compiled or linked against either. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/dtype.h"

namespace perseus::mpi {

// Open MPI's handles are pointers and MPICH's are ints. Both are passed in registers, of which a callee that wants an
// int reads the lower half, and both are written to memory that has room for a pointer.
using Handle = void*;

struct Functions {
  int (*initialized)(int* flag);
  int (*finalized)(int* flag);
  int (*init)(int* argc, char*** argv, int required, int* provided);
  int (*query_thread)(int* provided);
  int (*finalize)();  // where nobody else does
  int (*set_errors)(Handle communicator, Handle handler);
  int (*error_text)(int code, char* text, int* length);
  int (*rank)(Handle communicator, int* rank);
  int (*size)(Handle communicator, int* size);
  int (*duplicate)(Handle communicator, Handle* duplicate, Handle* request);
  int (*free)(Handle* communicator);
  int (*barrier)(Handle communicator, Handle* request);
  int (*test)(Handle* request, int* flag, void* status);
  int (*allreduce)(const void* in, void* out, int count, Handle type, Handle op, Handle communicator, Handle* request);
  int (*reduce_scatter)(const void* in, void* out, const int* counts, Handle type, Handle op, Handle communicator,
                        Handle* request);
  int (*broadcast)(void* data, int count, Handle type, int root, Handle communicator, Handle* request);
  int (*allgather)(const void* in, int count, Handle in_type, void* out, const int* counts, const int* places,
                   Handle out_type, Handle communicator, Handle* request);
  int (*alltoall)(const void* in, const int* in_counts, const int* in_places, Handle in_type, void* out,
                  const int* out_counts, const int* out_places, Handle out_type, Handle communicator, Handle* request);
};

// Requests have been given up: MPI_Finalize, which waits for them, is not called when the process ends.
void leave_unfinished();
// A failure ends this process: MPI_Finalize is called only if failures end all other ranks, too, within seconds.
void leave_after_failure();

class Library {
 public:
  // The library that this process has loaded already, else the one of the mpirun that has started it, else any that the
  // loader finds. Initialises MPI if nobody has, and ends it with the process then. Throws Error(kIo) where there is
  // none, and Error(kInvalidArgument) where another part of the process has initialised it for one thread alone.
  static std::unique_ptr<Library> open();

  Handle world() const { return world_; }
  Handle bytes() const { return bytes_; }
  void* in_place() const { return in_place_; }
  // Null where MPI has none that does what Perseus does: it knows no 16-bit floats, and does not propagate NaN.
  Handle type_of(DType dtype) const;
  Handle op_of(DType dtype, ReduceOp op) const;
  // Throws Error(kInvalidArgument) where MPI numbers the ranks in another way.
  void check_ranks(int rank, int size) const;

  // ---- calls; they throw Error(kIo) with MPI's own words ----
  const Functions& call() const { return functions_; }
  void check(const char* name, int code) const;
  // Has the request ended?
  bool test(Handle* request) const;
  // A communicator of the same members. Every member makes the same calls in the same order. Throws Error(kTimeout) at
  // `deadline_ns`, and Error(kAborted) once `interrupted`.
  Handle duplicate(Handle communicator, int64_t deadline_ns, const std::function<bool()>& interrupted) const;
  void free(Handle communicator) const noexcept;

 private:
  Library() = default;
  void find_handles();
  void initialise() const;
  Handle at(const char* name) const;

  void* library_ = nullptr;  // stays open: MPI has threads, and what it calls when the process ends
  std::string path_;
  Functions functions_{};
  Handle world_ = nullptr, bytes_ = nullptr, errors_return_ = nullptr;
  Handle types_[kDTypeCount] = {};
  Handle sum_ = nullptr, min_ = nullptr, max_ = nullptr, product_ = nullptr;
  void* in_place_ = nullptr;
  void* ignored_ = nullptr;  // MPI_STATUS_IGNORE
};

}  // namespace perseus::mpi

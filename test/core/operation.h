// An operation that several ranks do together, what it must result in, and one rank's part of it: buffers, request,
// check. An Operation is shared between the threads of all ranks, a Call belongs to one thread at a time.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>

#include "values.h"
#include "world.h"

namespace perseus_test {

using Shape = std::vector<int64_t>;

inline int64_t elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

struct Operation {
  perseus_kind kind = PERSEUS_ALLREDUCE;
  std::string name;
  std::vector<int> members;  // global ranks
  int group = 0;
  struct Tensor {
    perseus_dtype dtype = PERSEUS_FLOAT32;
    Shape shape;  // dimension 0 does not count where `rows` says otherwise
  };
  std::vector<Tensor> tensors;
  Reduction reduction;
  bool in_place = false;
  int root = 0;  // global rank
  uint64_t seed = 1;
  int priority = 0;
  bool transient = false;
  std::vector<int64_t> rows;                 // allgather, alltoall: dimension 0 of every member; empty = as in shape
  std::vector<std::vector<int64_t>> splits;  // alltoall: [from][to]; empty = equal parts

  Operation() = default;
  Operation(perseus_kind kind, std::string name, std::vector<int> members, std::vector<Tensor> tensors)
      : kind(kind), name(std::move(name)), members(std::move(members)), tensors(std::move(tensors)) {}

  uint64_t seed_of(size_t tensor) const { return seed * 64 + tensor; }
  int64_t rows_of(size_t tensor, size_t member) const { return rows.empty() ? tensors[tensor].shape[0] : rows[member]; }
  int64_t split(size_t tensor, size_t from, size_t to) const {
    return splits.empty() ? rows_of(tensor, from) / static_cast<int64_t>(members.size()) : splits[from][to];
  }
  // Of a reduction over the whole tensor; computed once.
  const Bytes& reduced(size_t tensor) const;
  std::string text() const;

 private:
  mutable std::mutex mutex_;
  mutable std::map<size_t, Bytes> reduced_;
};

class Call {
 public:
  Call(const Operation& operation, int rank);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const Operation& operation() const { return operation_; }
  perseus_request request() const;
  Outcome submit(perseus_context* context) { return perseus_test::submit(context, request(), &handle_); }
  perseus_handle handle() const { return handle_; }

  // Waits, checks and releases.
  void finish(perseus_context* context);
  void run(perseus_context* context);

  // Of a call that is done and not released.
  void check(perseus_context* context);

 protected:
  Bytes& input(size_t tensor) { return inputs_[tensor]; }
  Bytes& output(size_t tensor) { return operation_.in_place ? inputs_[tensor] : outputs_[tensor]; }
  size_t tensors() const { return tensors_.size(); }
  perseus_handle* handle_place() { return &handle_; }

 private:
  static constexpr unsigned char kGuard = 0xa5;  // behind every output
  static constexpr size_t kGuardBytes = 16;

  Bytes input_of(size_t tensor, int rank, int64_t first, int64_t count) const;
  void prepare(size_t i);

  bool owns_result() const;
  size_t row_bytes(size_t i) const;
  int64_t scattered_rows(size_t member, size_t i) const;

  // What came out, followed by the guard, against what should have.
  void compare(size_t tensor, const Bytes& got, const Bytes& expected) const;

  void check_scattered(size_t i);

  // Allgather and alltoall: what every member has for us, in order.
  void check_gathered(perseus_context* context, size_t i);

  const Operation& operation_;
  const int rank_;
  size_t member_ = 0;
  std::vector<Shape> shapes_;
  std::vector<Bytes> inputs_, outputs_;
  std::vector<perseus_tensor> tensors_;
  std::vector<int64_t> splits_;
  perseus_handle handle_ = 0;
};

std::vector<int> ranks_up_to(int size);

// Operations of every kind, dtype, reduction and of sizes from nothing to `most_bytes`, the same for the same seed.
std::unique_ptr<Operation> random_operation(uint64_t seed, const std::string& name, std::vector<int> members, int group,
                                            int64_t most_bytes);

}  // namespace perseus_test

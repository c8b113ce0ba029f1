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
  const Bytes& reduced(size_t tensor) const {
    std::lock_guard<std::mutex> lock(mutex_);
    Bytes& result = reduced_[tensor];
    const Tensor& t = tensors[tensor];
    const size_t count = static_cast<size_t>(elements(t.shape));
    if (result.empty() && count > 0) {
      bool plausible = true;
      result = expected_reduction(t.dtype, reduction, seed_of(tensor), members, 0, count, &plausible);
      EXPECT_TRUE(plausible) << "the reference itself is too far from float64: " << text();
    }
    return result;
  }
  std::string text() const {
    std::string text =
        "kind " + std::to_string(kind) + " '" + name + "' of " + std::to_string(members.size()) + " ranks";
    for (const Tensor& t : tensors) {
      text += std::string(" ") + name_of(t.dtype) + "[";
      for (int64_t d : t.shape) text += std::to_string(d) + ",";
      text += "]";
    }
    return text + " " + name_of(reduction.op) + " prescale " + std::to_string(reduction.prescale) + " postscale " +
           std::to_string(reduction.postscale) + (in_place ? " in place" : "");
  }

 private:
  mutable std::mutex mutex_;
  mutable std::map<size_t, Bytes> reduced_;
};

class Call {
 public:
  Call(const Operation& operation, int rank) : operation_(operation), rank_(rank) {
    while (operation.members[member_] != rank) ++member_;
    const size_t count = operation.tensors.size();
    shapes_.resize(count);
    inputs_.resize(count);
    outputs_.resize(count);
    tensors_.resize(count);
    for (size_t i = 0; i < count; ++i) prepare(i);
    if (!operation.splits.empty()) splits_ = operation.splits[member_];
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const Operation& operation() const { return operation_; }
  perseus_request request() const {
    perseus_request r =
        request_of(operation_.kind, operation_.name.c_str(), tensors_.data(), static_cast<int>(tensors_.size()));
    r.group = operation_.group;
    r.op = operation_.reduction.op;
    r.prescale = operation_.reduction.prescale;
    r.postscale = operation_.reduction.postscale;
    r.root = operation_.root;
    r.priority = operation_.priority;
    r.transient = operation_.transient ? 1 : 0;
    if (!splits_.empty()) {
      r.splits = splits_.data();
      r.split_count = static_cast<int>(splits_.size());
    }
    return r;
  }
  Outcome submit(perseus_context* context) { return perseus_test::submit(context, request(), &handle_); }
  perseus_handle handle() const { return handle_; }

  // Waits, checks and releases.
  void finish(perseus_context* context) {
    const Outcome outcome = wait(context, handle_);
    EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message << "\n" << operation_.text();
    if (outcome.code == PERSEUS_OK) check(context);
    EXPECT_EQ(perseus_handle_release(context, handle_), PERSEUS_OK) << perseus_error_message();
  }
  void run(perseus_context* context) {
    const Outcome outcome = submit(context);
    ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message << "\n" << operation_.text();
    finish(context);
  }

  // Of a call that is done and not released.
  void check(perseus_context* context) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      switch (operation_.kind) {
        case PERSEUS_ALLREDUCE:
          compare(i, output(i), operation_.reduced(i));
          break;
        case PERSEUS_BROADCAST:
          compare(i, output(i), input_of(i, operation_.root, 0, elements(shapes_[i])));
          break;
        case PERSEUS_REDUCESCATTER:
          check_scattered(i);
          break;
        default:
          check_gathered(context, i);
          break;
      }
      if (!operation_.in_place) {
        EXPECT_EQ(inputs_[i], input_of(i, rank_, 0, elements(shapes_[i]))) << "input changed: " << operation_.text();
      }
    }
  }

 private:
  static constexpr unsigned char kGuard = 0xa5;  // behind every output
  static constexpr size_t kGuardBytes = 16;

  Bytes input_of(size_t tensor, int rank, int64_t first, int64_t count) const {
    const perseus_dtype dtype = operation_.tensors[tensor].dtype;
    Bytes bytes(static_cast<size_t>(count) * size_of(dtype));
    fill(dtype, operation_.seed_of(tensor), rank, static_cast<size_t>(first), static_cast<size_t>(count), bytes.data());
    return bytes;
  }
  Bytes& output(size_t tensor) { return operation_.in_place ? inputs_[tensor] : outputs_[tensor]; }

  void prepare(size_t i) {
    const Operation::Tensor& t = operation_.tensors[i];
    shapes_[i] = t.shape;
    if (!operation_.rows.empty()) shapes_[i][0] = operation_.rows[member_];
    inputs_[i] = input_of(i, rank_, 0, elements(shapes_[i]));
    size_t result = inputs_[i].size();
    if (operation_.kind == PERSEUS_REDUCESCATTER)
      result = static_cast<size_t>(scattered_rows(member_, i)) * row_bytes(i);
    if (operation_.in_place) inputs_[i].resize(inputs_[i].size() + kGuardBytes, kGuard);
    else outputs_[i].assign(result + kGuardBytes, kGuard);
    tensors_[i] = perseus_tensor{inputs_[i].data(), output(i).data(), shapes_[i].data(),
                                 static_cast<int>(shapes_[i].size()), t.dtype};
  }

  size_t row_bytes(size_t i) const {
    const Shape& shape = operation_.tensors[i].shape;
    return static_cast<size_t>(elements(Shape(shape.begin() + 1, shape.end()))) * size_of(operation_.tensors[i].dtype);
  }
  int64_t scattered_rows(size_t member, size_t i) const {
    const int64_t ranks = static_cast<int64_t>(operation_.members.size()), rows = operation_.tensors[i].shape[0];
    return rows / ranks + (static_cast<int64_t>(member) < rows % ranks ? 1 : 0);
  }

  // What came out, followed by the guard, against what should have.
  void compare(size_t tensor, const Bytes& got, const Bytes& expected) const {
    ASSERT_EQ(got.size(), expected.size() + kGuardBytes) << operation_.text();
    const size_t at =
        static_cast<size_t>(std::mismatch(expected.begin(), expected.end(), got.begin()).first - expected.begin());
    EXPECT_EQ(at, expected.size()) << "rank " << rank_ << " tensor " << tensor << ": first wrong element "
                                   << at / size_of(operation_.tensors[tensor].dtype) << "\n"
                                   << operation_.text();
    for (size_t i = expected.size(); i < got.size(); ++i)
      ASSERT_EQ(got[i], kGuard) << "rank " << rank_ << " wrote behind the output: " << operation_.text();
  }

  void check_scattered(size_t i) {
    const Bytes& whole = operation_.reduced(i);
    size_t begin = 0;
    for (size_t m = 0; m < member_; ++m) begin += static_cast<size_t>(scattered_rows(m, i)) * row_bytes(i);
    const size_t size = static_cast<size_t>(scattered_rows(member_, i)) * row_bytes(i);
    compare(i, output(i),
            Bytes(whole.begin() + static_cast<int64_t>(begin), whole.begin() + static_cast<int64_t>(begin + size)));
  }

  // Allgather and alltoall: what every member has for us, in order.
  void check_gathered(perseus_context* context, size_t i) {
    perseus_output out{};
    out.struct_size = sizeof out;
    ASSERT_EQ(perseus_handle_output(context, handle_, static_cast<int>(i), &out), PERSEUS_OK)
        << perseus_error_message();
    const bool all_to_all = operation_.kind == PERSEUS_ALLTOALL;
    const int64_t row = static_cast<int64_t>(row_bytes(i) / size_of(operation_.tensors[i].dtype));
    Bytes expected;
    Shape shape = shapes_[i];
    shape[0] = 0;
    std::vector<int64_t> received;
    for (size_t m = 0; m < operation_.members.size(); ++m) {
      int64_t first = 0;
      for (size_t to = 0; to < member_ && all_to_all; ++to) first += operation_.split(i, m, to);
      const int64_t rows = all_to_all ? operation_.split(i, m, member_) : operation_.rows_of(i, m);
      const Bytes part = input_of(i, operation_.members[m], first * row, rows * row);
      expected.insert(expected.end(), part.begin(), part.end());
      shape[0] += rows;
      received.push_back(rows);
    }
    EXPECT_EQ(Shape(out.shape, out.shape + out.ndim), shape) << operation_.text();
    EXPECT_EQ(std::vector<int64_t>(out.received_splits, out.received_splits + out.received_split_count), received)
        << operation_.text();
    ASSERT_EQ(out.size, expected.size()) << operation_.text();
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), static_cast<unsigned char*>(out.data)))
        << "rank " << rank_ << " " << operation_.text();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(out.data) % 64, 0u);
  }

  const Operation& operation_;
  const int rank_;
  size_t member_ = 0;
  std::vector<Shape> shapes_;
  std::vector<Bytes> inputs_, outputs_;
  std::vector<perseus_tensor> tensors_;
  std::vector<int64_t> splits_;
  perseus_handle handle_ = 0;
};

inline std::vector<int> ranks_up_to(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Operations of every kind, dtype, reduction and of sizes from nothing to `most_bytes`, the same for the same seed.
inline std::unique_ptr<Operation> random_operation(uint64_t seed, const std::string& name, std::vector<int> members,
                                                   int group, int64_t most_bytes) {
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  auto made = std::make_unique<Operation>();
  Operation& o = *made;
  o.kind = static_cast<perseus_kind>(below(3) != 0 ? 0 : below(5));  // mostly allreduce
  o.name = name;
  o.members = std::move(members);
  o.group = group;
  o.seed = seed;
  const int64_t ranks = static_cast<int64_t>(o.members.size());
  const int64_t tensors = o.kind != PERSEUS_ALLTOALL && below(4) == 0 ? 1 + below(5) : 1;
  for (int64_t i = 0; i < tensors; ++i) {
    const perseus_dtype dtype = kDTypes[below(10)];
    int64_t size = int64_t{1} << below(static_cast<int64_t>(std::log2(static_cast<double>(most_bytes))));
    size = below(size + 1) / static_cast<int64_t>(size_of(dtype));
    if (o.kind == PERSEUS_ALLREDUCE || o.kind == PERSEUS_BROADCAST) {
      o.tensors.push_back({dtype, {size}});
    } else {
      const int64_t tail = 1 + below(5);
      o.tensors.push_back({dtype, {std::max<int64_t>(size / tail / ranks, 1) * ranks, tail}});
    }
  }
  do o.reduction.op = kReductions[below(5)];
  while (o.reduction.op == PERSEUS_AVERAGE &&
         std::any_of(o.tensors.begin(), o.tensors.end(), [](auto& t) { return t.dtype == PERSEUS_BOOL; }));
  if (below(4) == 0) o.reduction.prescale = 0.75;
  if (below(4) == 0) o.reduction.postscale = 1.0 / 3;
  o.in_place = below(2) == 0 && (o.kind == PERSEUS_ALLREDUCE || o.kind == PERSEUS_BROADCAST);
  o.root = o.members[static_cast<size_t>(below(ranks))];
  if (o.kind == PERSEUS_ALLGATHER && below(2) == 0)
    for (int64_t i = 0; i < ranks; ++i) o.rows.push_back(below(o.tensors[0].shape[0] + 1));
  return made;
}

}  // namespace perseus_test

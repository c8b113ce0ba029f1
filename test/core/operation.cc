#include "operation.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace perseus_test {

const Bytes& Operation::reduced(size_t tensor) const {
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

std::string Operation::text() const {
  std::string text = "kind " + std::to_string(kind) + " '" + name + "' of " + std::to_string(members.size()) + " ranks";
  for (const Tensor& t : tensors) {
    text += std::string(" ") + name_of(t.dtype) + "[";
    for (int64_t d : t.shape) text += std::to_string(d) + ",";
    text += "]";
  }
  return text + " " + name_of(reduction.op) + " prescale " + std::to_string(reduction.prescale) + " postscale " +
         std::to_string(reduction.postscale) + (in_place ? " in place" : "");
}

Call::Call(const Operation& operation, int rank) : operation_(operation), rank_(rank) {
  while (operation.members[member_] != rank) ++member_;
  const size_t count = operation.tensors.size();
  shapes_.resize(count);
  inputs_.resize(count);
  outputs_.resize(count);
  tensors_.resize(count);
  for (size_t i = 0; i < count; ++i) prepare(i);
  if (!operation.splits.empty()) splits_ = operation.splits[member_];
}

perseus_request Call::request() const {
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

void Call::finish(perseus_context* context) {
  const Outcome outcome = wait(context, handle_);
  EXPECT_EQ(outcome.code, PERSEUS_OK) << outcome.message << "\n" << operation_.text();
  if (outcome.code == PERSEUS_OK) check(context);
  EXPECT_EQ(perseus_handle_release(context, handle_), PERSEUS_OK) << perseus_error_message();
}

void Call::run(perseus_context* context) {
  const Outcome outcome = submit(context);
  ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message << "\n" << operation_.text();
  finish(context);
}

void Call::check(perseus_context* context) {
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

Bytes Call::input_of(size_t tensor, int rank, int64_t first, int64_t count) const {
  const perseus_dtype dtype = operation_.tensors[tensor].dtype;
  Bytes bytes(static_cast<size_t>(count) * size_of(dtype));
  fill(dtype, operation_.seed_of(tensor), rank, static_cast<size_t>(first), static_cast<size_t>(count), bytes.data());
  return bytes;
}

void Call::prepare(size_t i) {
  const Operation::Tensor& t = operation_.tensors[i];
  shapes_[i] = t.shape;
  if (!operation_.rows.empty()) shapes_[i][0] = operation_.rows[member_];
  inputs_[i] = input_of(i, rank_, 0, elements(shapes_[i]));
  size_t result = inputs_[i].size();
  if (operation_.kind == PERSEUS_REDUCESCATTER) result = static_cast<size_t>(scattered_rows(member_, i)) * row_bytes(i);
  if (operation_.kind == PERSEUS_ALLGATHER) result *= operation_.members.size();
  if (operation_.in_place) inputs_[i].resize(inputs_[i].size() + kGuardBytes, kGuard);
  else outputs_[i].assign(result + kGuardBytes, kGuard);
  tensors_[i] = perseus_tensor{inputs_[i].data(), owns_result() ? output(i).data() : nullptr, shapes_[i].data(),
                               static_cast<int>(shapes_[i].size()), t.dtype};
}

// Has the caller memory for the result? Of gathered ones, every other rank, which the others need not know.
bool Call::owns_result() const {
  if (operation_.kind == PERSEUS_ALLTOALL) return false;
  return operation_.kind != PERSEUS_ALLGATHER || (member_ % 2 == 1 && !operation_.in_place);
}

size_t Call::row_bytes(size_t i) const {
  const Shape& shape = operation_.tensors[i].shape;
  return static_cast<size_t>(elements(Shape(shape.begin() + 1, shape.end()))) * size_of(operation_.tensors[i].dtype);
}

int64_t Call::scattered_rows(size_t member, size_t i) const {
  const int64_t ranks = static_cast<int64_t>(operation_.members.size()), rows = operation_.tensors[i].shape[0];
  return rows / ranks + (static_cast<int64_t>(member) < rows % ranks ? 1 : 0);
}

void Call::compare(size_t tensor, const Bytes& got, const Bytes& expected) const {
  ASSERT_EQ(got.size(), expected.size() + kGuardBytes) << operation_.text();
  // ThreadSanitizer looks at what memcmp reads as a whole, at what std::mismatch reads byte by byte.
  if (!expected.empty() && std::memcmp(expected.data(), got.data(), expected.size()) != 0) {
    const auto wrong = std::mismatch(expected.begin(), expected.end(), got.begin()).first - expected.begin();
    ADD_FAILURE() << "rank " << rank_ << " tensor " << tensor << ": first wrong element "
                  << static_cast<size_t>(wrong) / size_of(operation_.tensors[tensor].dtype) << "\n"
                  << operation_.text();
  }
  for (size_t i = expected.size(); i < got.size(); ++i)
    ASSERT_EQ(got[i], kGuard) << "rank " << rank_ << " wrote behind the output: " << operation_.text();
}

void Call::check_scattered(size_t i) {
  const Bytes& whole = operation_.reduced(i);
  size_t begin = 0;
  for (size_t m = 0; m < member_; ++m) begin += static_cast<size_t>(scattered_rows(m, i)) * row_bytes(i);
  const size_t size = static_cast<size_t>(scattered_rows(member_, i)) * row_bytes(i);
  compare(i, output(i),
          Bytes(whole.begin() + static_cast<int64_t>(begin), whole.begin() + static_cast<int64_t>(begin + size)));
}

void Call::check_gathered(perseus_context* context, size_t i) {
  perseus_output out{};
  out.struct_size = sizeof out;
  ASSERT_EQ(perseus_handle_output(context, handle_, static_cast<int>(i), &out), PERSEUS_OK) << perseus_error_message();
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
  const bool even = expected.size() == inputs_[i].size() * operation_.members.size();
  if (operation_.tensors.size() == 1 && owns_result() && even) {
    EXPECT_EQ(out.data, nullptr) << operation_.text();
    compare(i, output(i), expected);
    return;
  }
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), static_cast<unsigned char*>(out.data)))
      << "rank " << rank_ << " " << operation_.text();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(out.data) % 64, 0u);
}

std::unique_ptr<Operation> random_operation(uint64_t seed, const std::string& name, std::vector<int> members, int group,
                                            int64_t most_bytes) {
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

std::vector<int> ranks_up_to(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace perseus_test

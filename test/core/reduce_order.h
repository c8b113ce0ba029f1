// In which order the algorithms of an allreduce reduce one element, as docs/algorithms.md says, one element at a time.
#pragma once

#include <string>

#include "values.h"

namespace perseus_test {

constexpr const char* kAlgorithms[] = {"pairwise", "halving_doubling", "ring", "recursive_doubling"};

// Of each of `count` parts of so many bytes but the last ones.
inline size_t part_bytes(size_t bytes, size_t count) { return ((bytes + count - 1) / count + 63) / 64 * 64; }

// A reduction of two whose factor is `post`; integers divide by `divisor`.
template <typename Type>
typename Type::Stored pair(Type type, const Reduction& how, typename Type::Stored a, typename Type::Stored b, bool last,
                           int divisor) {
  using Stored = typename Type::Stored;
  const perseus_reduce_op op = how.op == PERSEUS_AVERAGE ? PERSEUS_SUM : how.op;
  const Stored both[] = {a, b};
  if (!last) return reduced(type, Reduction{op, 1.0, 1.0}, both, 2);
  if constexpr (std::is_integral_v<typename Type::Acc> && !std::is_same_v<Type, Truth>) {
    const Stored sum = reduced(type, Reduction{op, 1.0, 1.0}, both, 2);
    if (how.postscale == 1.0) return static_cast<Stored>(sum / static_cast<Stored>(divisor));
    return truncated<Stored>(static_cast<double>(sum) * how.postscale / divisor);
  } else {
    return reduced(type, Reduction{op, 1.0, how.postscale / divisor}, both, 2);
  }
}

// values: one element of each of at least two members, in their order; `part`: of a ring's parts, the element's own.
template <typename Type>
typename Type::Stored reduced_by(Type type, const std::string& algorithm, const Reduction& how, size_t part,
                                 std::vector<typename Type::Stored> values, int divisor) {
  using Stored = typename Type::Stored;
  const perseus_reduce_op op = how.op == PERSEUS_AVERAGE ? PERSEUS_SUM : how.op;
  for (Stored& value : values)
    if (how.prescale != 1.0) value = reduced(type, Reduction{op, how.prescale, 1.0}, &value, 1);
  const size_t count = values.size();
  if (algorithm == "ring") {
    Stored sum = values[part];
    for (size_t i = 1; i < count; ++i) sum = pair(type, how, sum, values[(part + i) % count], i + 1 == count, divisor);
    return sum;
  }
  size_t power = 1;
  while (power * 2 <= count) power *= 2;
  std::vector<Stored> level;
  for (size_t i = 0; i < count; ++i) {
    const bool paired = i + 1 < 2 * (count - power);
    level.push_back(paired ? pair(type, how, values[i], values[i + 1], false, 1) : values[i]);
    if (paired) ++i;
  }
  while (level.size() > 1) {
    std::vector<Stored> next;
    for (size_t i = 0; i < level.size(); i += 2)
      next.push_back(pair(type, how, level[i], level[i + 1], level.size() == 2, divisor));
    level = std::move(next);
  }
  return level[0];
}

}  // namespace perseus_test

// Compiled without ThreadSanitizer, which would look at every element of what no thread shares. What others see is
// written by memcpy, which it looks at as a whole.
#include "values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace perseus_test {
namespace {

constexpr size_t kBlock = 1024;

template <typename Type>
void fill_block(Type type, uint64_t base, size_t count, typename Type::Stored* to) {
  for (size_t i = 0; i < count; ++i) to[i] = element(type, mix(base + i));
}

// The same in float64: how far the exact result may be from it.
template <typename Type>
bool near_reference(Type, const Reduction& how, const typename Type::Stored* values, int ranks,
                    typename Type::Stored result) {
  double acc = 0, magnitude = 0;
  for (int r = 0; r < ranks; ++r) {
    const double x = static_cast<double>(Type::load(values[r])) * how.prescale;
    acc = r == 0 ? x : combine(how.op, acc, x);
    magnitude = how.op == PERSEUS_PRODUCT ? std::fabs(acc) : magnitude + std::fabs(x);
  }
  const double post = how.postscale / (how.op == PERSEUS_AVERAGE ? ranks : 1);
  constexpr double kStoredStep = std::is_same_v<Type, Half>        ? 0x1p-11
                                 : std::is_same_v<Type, BFloat>    ? 0x1p-8
                                 : sizeof(typename Type::Acc) == 4 ? 0x1p-24
                                                                   : 0x1p-53;
  constexpr double kAccStep = sizeof(typename Type::Acc) == 4 ? 0x1p-24 : 0x1p-53;
  const double tolerance = (magnitude * kAccStep * (2 * ranks + 3) + std::fabs(acc) * kStoredStep) * std::fabs(post) +
                           0x1p-24;  // f16 denormals
  return std::fabs(static_cast<double>(Type::load(result)) - acc * post) <= tolerance;
}

}  // namespace

void fill(perseus_dtype dtype, uint64_t seed, int rank, size_t first, size_t count, void* out) {
  const uint64_t base = mix(seed * 1009 + static_cast<uint64_t>(rank)) + first;
  with_type(dtype, [&](auto type) {
    typename decltype(type)::Stored block[kBlock];
    for (size_t done = 0; done < count; done += kBlock) {
      const size_t now = std::min(kBlock, count - done);
      fill_block(type, base + done, now, block);
      std::memcpy(static_cast<unsigned char*>(out) + done * sizeof block[0], block, now * sizeof block[0]);
    }
  });
}

Bytes expected_reduction(perseus_dtype dtype, const Reduction& how, uint64_t seed, const std::vector<int>& members,
                         size_t first, size_t count, bool* plausible) {
  Bytes result(count * size_of(dtype));
  const int ranks = static_cast<int>(members.size());
  with_type(dtype, [&](auto type) {
    using Stored = typename decltype(type)::Stored;
    std::vector<Stored> inputs(kBlock * members.size()), values(members.size());
    auto* out = reinterpret_cast<Stored*>(result.data());
    for (size_t done = 0; done < count; done += kBlock) {
      const size_t now = std::min(kBlock, count - done);
      for (int r = 0; r < ranks; ++r) fill(dtype, seed, members[r], first + done, now, &inputs[kBlock * r]);
      for (size_t i = 0; i < now; ++i) {
        for (int r = 0; r < ranks; ++r) values[r] = inputs[kBlock * r + i];
        out[done + i] = reduced(type, how, values.data(), ranks);
        if constexpr (std::is_floating_point_v<typename decltype(type)::Acc>)
          if (!near_reference(type, how, values.data(), ranks, out[done + i])) *plausible = false;
      }
    }
  });
  return result;
}

}  // namespace perseus_test

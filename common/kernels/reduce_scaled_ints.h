// reduce for integers with factors or a divisor: plain loops over small blocks, which the compiler vectorises.
// Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/reduce_types.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {

template <class T>
class ScaledIntReduction {
 public:
  explicit ScaledIntReduction(const ReduceTask& task) : task_(task) {}

  void run() const {
    T acc[kBlock];
    for (size_t begin = 0; begin < task_.count; begin += kBlock) {
      size_t count = task_.count - begin < kBlock ? task_.count - begin : kBlock;
      load(0, begin, count, acc);
      T next[kBlock];
      for (int k = 1; k < task_.n; ++k) {
        load(k, begin, count, next);
        combine(acc, next, count);
      }
      if (task_.spec.postscale == 1.0) {
        divide(acc, count);
      } else {
        scale(acc, count, task_.spec.postscale, task_.spec.divisor);
      }
      __builtin_memcpy(task_.dst + begin * sizeof(T), acc, count * sizeof(T));
      if (task_.dst2 != nullptr) __builtin_memcpy(task_.dst2 + begin * sizeof(T), acc, count * sizeof(T));
    }
  }

 private:
  static constexpr size_t kBlock = 512;
  static constexpr bool kSigned = T(-1) < T(0);
  static constexpr int kBits = sizeof(T) * 8 - (kSigned ? 1 : 0);
  // Doubles: one past the largest T is a power of two and exact, the smallest T too.
  static constexpr double kPast = 2.0 * static_cast<double>(uint64_t{1} << (kBits - 1));
  static constexpr double kLowest = kSigned ? -kPast : 0.0;
  static constexpr T kMax = static_cast<T>((uint64_t{1} << kBits) - 1);
  static constexpr T kMin = kSigned ? static_cast<T>(~kMax) : T(0);

  // Beyond T's range the nearest limit, NaN gives 0: C++ leaves both open, machines differ.
  static PERSEUS_INLINE T truncate(double value) {
    if (!(value == value)) return 0;
    if (value >= kPast) return kMax;
    if (value <= kLowest) return kMin;
    return static_cast<T>(value);
  }

  // One truncation for both: a mean of 2.5 times 2 is 5.
  static void scale(T* values, size_t count, double factor, double divisor) {
    for (size_t i = 0; i < count; ++i) values[i] = truncate(static_cast<double>(values[i]) * factor / divisor);
  }

  void load(int k, size_t begin, size_t count, T* to) const {
    __builtin_memcpy(to, task_.sources[k] + begin * sizeof(T), count * sizeof(T));
    if (task_.spec.prescale != 1.0) scale(to, count, task_.spec.prescale, 1.0);
  }

  void combine(T* acc, const T* next, size_t count) const {
    switch (task_.spec.op) {
      case ReduceOp::kMin:
        for (size_t i = 0; i < count; ++i) acc[i] = next[i] < acc[i] ? next[i] : acc[i];
        break;
      case ReduceOp::kMax:
        for (size_t i = 0; i < count; ++i) acc[i] = next[i] > acc[i] ? next[i] : acc[i];
        break;
      case ReduceOp::kProduct:  // as uint64_t, where wrapping is defined and the low bits are the same
        for (size_t i = 0; i < count; ++i) acc[i] = static_cast<T>(uint64_t(acc[i]) * uint64_t(next[i]));
        break;
      default:
        for (size_t i = 0; i < count; ++i) acc[i] = static_cast<T>(uint64_t(acc[i]) + uint64_t(next[i]));
    }
  }

  void divide(T* values, size_t count) const {
    if (task_.spec.divisor == 1) return;
    if (sizeof(T) == 8) {
      int64_t divisor = task_.spec.divisor;
      for (size_t i = 0; i < count; ++i) values[i] = static_cast<T>(values[i] / divisor);
      return;
    }
    // Up to 32 bits the rounded quotient never reaches the next integer, and doubles divide in lanes.
    double divisor = task_.spec.divisor;
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<T>(static_cast<double>(values[i]) / divisor);
  }

  const ReduceTask task_;
};

}  // namespace
}  // namespace perseus::kernels

// Loops over single gradients: is there a NaN, and running sums of f16 and bf16 in f32. Internal linkage, see
// variant.h; no threads.
#pragma once

#include "kernels/page_walk.h"
#include "kernels/reduce_types.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {

// ---- NaN ------------------------------------------------------------------------------------------------------------

// As integers without their sign, NaNs are what lies above infinity: the largest of many tells whether one of them is.
template <class Int, Int kInfinity>
bool has_nan_as(const unsigned char* data, size_t bytes) {
  using Lanes = Vector<Int>;
  constexpr size_t kVectors = kGroupBytes / sizeof(Lanes);
  constexpr size_t kBlock = 256 * 1024;  // between looks at what was found
  constexpr Int kMagnitude = static_cast<Int>(~(Int{1} << (8 * sizeof(Int) - 1)));
  for (size_t begin = 0; begin < bytes; begin += kBlock) {
    const unsigned char* from = data + begin;
    const size_t block = bytes - begin < kBlock ? bytes - begin : kBlock;
    Lanes largest{};
    const auto look = [&](Lanes value) __attribute__((always_inline)) {
      value = value & kMagnitude;
      largest = value > largest ? value : largest;
    };
    size_t at = walk_pages<kGroupBytes>(block, [&](size_t offset) __attribute__((always_inline)) {
      for (size_t v = 0; v < kVectors; ++v) look(load_vector<Lanes>(from + offset + v * sizeof(Lanes)));
    });
    for (; block - at >= sizeof(Lanes); at += sizeof(Lanes)) look(load_vector<Lanes>(from + at));
    unsigned char rest[sizeof(Lanes)] = {};
    __builtin_memcpy(rest, from + at, block - at);
    look(load_vector<Lanes>(rest));
    for (size_t lane = 0; lane < sizeof(Lanes) / sizeof(Int); ++lane)
      if (largest[lane] > kInfinity) return true;
  }
  return false;
}

bool has_nan_any(DType dtype, const unsigned char* data, size_t count) {
  switch (dtype) {
    case DType::kFloat16:
      return has_nan_as<int16_t, 0x7c00>(data, count * 2);
    case DType::kBFloat16:
      return has_nan_as<int16_t, 0x7f80>(data, count * 2);
    case DType::kFloat32:
      return has_nan_as<int32_t, 0x7f800000>(data, count * 4);
    case DType::kFloat64:
      return has_nan_as<int64_t, 0x7ff0000000000000>(data, count * 8);
    default:
      return false;
  }
}

// ---- sums of 16-bit floats ------------------------------------------------------------------------------------------

template <class Format>
class HalfSum {
 public:
  explicit HalfSum(const HalfSumTask& task) : task_(task) {}

  void run() const {
    size_t at = 0;
    for (; task_.count - at >= kFloatLanes; at += kFloatLanes)
      vector(reinterpret_cast<unsigned char*>(task_.sum + at), task_.x + 2 * at, task_.dst + 2 * at);
    const size_t left = task_.count - at;
    if (left == 0) return;
    unsigned char sum[sizeof(Floats)] = {}, x[sizeof(Halves)] = {}, dst[sizeof(Halves)] = {};
    __builtin_memcpy(sum, task_.sum + at, left * sizeof(float));
    __builtin_memcpy(x, task_.x + 2 * at, left * 2);
    vector(sum, x, dst);
    if (task_.part == SumPart::kFinish) __builtin_memcpy(task_.dst + 2 * at, dst, left * 2);
    else __builtin_memcpy(task_.sum + at, sum, left * sizeof(float));
  }

 private:
  using Type = FloatType<Format, false>;
  static constexpr Factors kNone{1.0, 1.0};

  PERSEUS_INLINE void vector(unsigned char* sum, const unsigned char* x, unsigned char* dst) const {
    Floats value = Type::load(x, kNone);
    if (task_.part != SumPart::kStart) value = load_vector<Floats>(sum) + value;
    if (task_.part == SumPart::kFinish) store_vector(dst, Type::finish(value, kNone));
    else store_vector(sum, value);
  }

  const HalfSumTask task_;
};

void sum_halves(const HalfSumTask& task) {
  if (task.dtype == DType::kFloat16) HalfSum<Float16>(task).run();
  else HalfSum<BFloat16>(task).run();
}

}  // namespace
}  // namespace perseus::kernels

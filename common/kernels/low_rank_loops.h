// Loops over a matrix and a few vectors. Where elements of a row are summed, sixteen running sums take them in turn,
// whatever a vector's width. Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/codec_loops.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {

constexpr size_t kSums = 16;
constexpr size_t kSumVectors = kSums / kFloatLanes;
static_assert(kSums % kFloatLanes == 0, "running sums are whole vectors");
// Vectors of p or q that are worked on together: each further one costs a pass over the matrix less.
constexpr size_t kTogether = 4;
// Rows that are worked on together, so that sums over rows are loaded and stored less often.
constexpr size_t kRows = 8;
// Elements of a result that does not stay in a core's cache anyway.
constexpr size_t kStreamedFrom = 256 * 1024;

PERSEUS_INLINE float sum_of(const Floats* sums) {
  float lanes[kSums];
  __builtin_memcpy(lanes, sums, sizeof lanes);
  for (size_t width = kSums / 2; width > 0; width /= 2)
    for (size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// Some of p's columns, `kCount` from `first` on.
template <size_t kCount>
void project_some(const LowRankTask& task, size_t first) {
  const size_t cols = task.shape.cols, whole = cols / kSums * kSums;
  for (size_t row = 0; row < task.shape.rows; ++row) {
    const float* w = task.w + row * cols;
    Floats sums[kCount][kSumVectors] = {};
    for (size_t at = 0; at < whole; at += kSums)
      for (size_t v = 0; v < kSumVectors; ++v) {
        const size_t place = at + v * kFloatLanes;
        const Floats value = load_floats(w + place);
        for (size_t k = 0; k < kCount; ++k) sums[k][v] += value * load_floats(task.q + (first + k) * cols + place);
      }
    for (size_t k = 0; k < kCount; ++k) {
      const float* q = task.q + (first + k) * cols;
      float sum = sum_of(sums[k]);
      for (size_t at = whole; at < cols; ++at) sum += w[at] * q[at];
      task.p[row * task.rank + first + k] = sum;
    }
  }
}

// q += a few rows of w, each times its element of p; vector by vector, then what is left.
template <size_t kCount>
PERSEUS_INLINE void add_rows(const LowRankTask& task, size_t row) {
  const size_t cols = task.shape.cols, whole = cols / kFloatLanes * kFloatLanes;
  const float* w = task.w + row * cols;
  const float* p = task.p + row * task.rank;
  for (size_t at = 0; at < whole; at += kFloatLanes) {
    Floats values[kCount];
    for (size_t r = 0; r < kCount; ++r) values[r] = load_floats(w + r * cols + at);
    for (size_t k = 0; k < task.rank; ++k) {
      float* q = task.q_out + k * cols + at;
      Floats sum = load_floats(q);
      for (size_t r = 0; r < kCount; ++r) sum += values[r] * p[r * task.rank + k];
      store_floats(q, sum);
    }
  }
  for (size_t k = 0; k < task.rank; ++k)
    for (size_t at = whole; at < cols; ++at) {
      float sum = task.q_out[k * cols + at];
      for (size_t r = 0; r < kCount; ++r) sum += w[r * cols + at] * p[r * task.rank + k];
      task.q_out[k * cols + at] = sum;
    }
}

void project_any(const LowRankTask& task) {
  size_t first = 0;
  for (; task.rank - first >= kTogether; first += kTogether) project_some<kTogether>(task, first);
  for (; first < task.rank; ++first) project_some<1>(task, first);
}

void project_back_any(const LowRankTask& task) {
  __builtin_memset(task.q_out, 0, task.rank * task.shape.cols * sizeof(float));
  size_t row = 0;
  for (; task.shape.rows - row >= kRows; row += kRows) add_rows<kRows>(task, row);
  for (; row < task.shape.rows; ++row) add_rows<1>(task, row);
}

// out = p q, the same around the cache, out = out - p q, or out = carry (out - p q) + x.
enum class Output { kStore, kStream, kSubtract, kAdvance };

template <Output kOutput, class Value>
PERSEUS_INLINE Value combined(Value product, Value out, Value x, float carry) {
  if constexpr (kOutput == Output::kSubtract) return out - product;
  if constexpr (kOutput == Output::kAdvance) return (out - product) * carry + x;
  return product;
}

template <Output kOutput>
PERSEUS_INLINE void product(const LowRankTask& task) {
  const size_t cols = task.shape.cols, whole = cols / kFloatLanes * kFloatLanes;
  for (size_t row = 0; row < task.shape.rows; ++row) {
    const float* p = task.p + row * task.rank;
    float* out = task.out + row * cols;
    const float* x = kOutput == Output::kAdvance ? task.x + row * cols : out;
    for (size_t at = 0; at < whole; at += kFloatLanes) {
      Floats sum = load_floats(task.q + at) * p[0];
      for (size_t k = 1; k < task.rank; ++k) sum += load_floats(task.q + k * cols + at) * p[k];
      if constexpr (kOutput == Output::kStream) stream_vector(reinterpret_cast<unsigned char*>(out + at), sum);
      else if constexpr (kOutput == Output::kStore) store_floats(out + at, sum);
      else store_floats(out + at, combined<kOutput>(sum, load_floats(out + at), load_floats(x + at), task.carry));
    }
    for (size_t at = whole; at < cols; ++at) {
      float sum = task.q[at] * p[0];
      for (size_t k = 1; k < task.rank; ++k) sum += task.q[k * cols + at] * p[k];
      out[at] = combined<kOutput>(sum, out[at], x[at], task.carry);
    }
  }
}

void expand_any(const LowRankTask& task) {
  const bool aligned =
      reinterpret_cast<uintptr_t>(task.out) % sizeof(Floats) == 0 && task.shape.cols % kFloatLanes == 0;
  if (!aligned || task.shape.rows * task.shape.cols < kStreamedFrom) return product<Output::kStore>(task);
  product<Output::kStream>(task);
  stream_fence();
}
void subtract_product_any(const LowRankTask& task) { product<Output::kSubtract>(task); }
void advance_any(const LowRankTask& task) { product<Output::kAdvance>(task); }

constexpr LowRankKernels kLowRankKernels{project_any, project_back_any, expand_any, subtract_product_any, advance_any};

}  // namespace
}  // namespace perseus::kernels

// Guards the chosen variant's loops, and what is too small to need them. Thread-safe.
#include "kernels/low_rank.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "kernels/codec_kernels.h"
#include "kernels/float_mode.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {

// What is left of a column beside earlier ones must be more than roundings.
constexpr double kIndependent = 1e-6;
// Elements that a core's own cache keeps, with what belongs to them, from one loop to the next.
constexpr size_t kCached = 8 * 1024;

const LowRankKernels& low_rank() { return current_variant().low_rank; }

// Of some rows of a product, from `row` on.
LowRankTask product_task(const Product& product, MatrixShape some, size_t row, float* out, const float* x = nullptr,
                         float carry = 1.0F) {
  float* const p = const_cast<float*>(product.p.data()) + row * product.rank;
  return {some, product.rank, nullptr, product.q.data(), p, nullptr, out, x, carry};
}

double dot(const float* p, size_t rows, size_t rank, size_t a, size_t b) {
  double sum = 0;
  for (size_t row = 0; row < rows; ++row)
    sum += static_cast<double>(p[row * rank + a]) * static_cast<double>(p[row * rank + b]);
  return sum;
}

// SplitMix64 (Steele, Lea and Flood 2014).
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace

void project(const float* w, MatrixShape shape, const float* q, size_t rank, float* p) {
  DefaultFloatMode mode;
  low_rank().project(LowRankTask{shape, rank, w, q, p, nullptr, nullptr});
}

void add_and_project(const float* x, float carry, const Product& sent, float* w, MatrixShape shape, const float* q,
                     size_t rank, float* p) {
  if (!sent.empty() && (sent.shape.rows != shape.rows || sent.shape.cols != shape.cols))
    fail(ErrorKind::kInternal, "[kernels] a product of another shape was taken from this matrix");
  const size_t together = std::max<size_t>(1, kCached / shape.cols);
  for (size_t row = 0; row < shape.rows; row += together) {
    const MatrixShape some{std::min(together, shape.rows - row), shape.cols};
    float* const rows = w + row * shape.cols;
    const float* const added = x + row * shape.cols;
    if (sent.empty()) {
      add_to_residual(added, carry, rows, some.rows * some.cols);
    } else {
      DefaultFloatMode mode;
      low_rank().advance(product_task(sent, some, row, rows, added, carry));
    }
    project(rows, some, q, rank, p + row * rank);
  }
}

void project_back(const float* w, MatrixShape shape, const float* p, size_t rank, float* q) {
  DefaultFloatMode mode;
  low_rank().project_back(LowRankTask{shape, rank, w, nullptr, const_cast<float*>(p), q, nullptr});
}

void expand(const float* p, const float* q, MatrixShape shape, size_t rank, float* out) {
  DefaultFloatMode mode;
  low_rank().expand(LowRankTask{shape, rank, nullptr, q, const_cast<float*>(p), nullptr, out});
}

void subtract(const Product& product, float* w) {
  DefaultFloatMode mode;
  low_rank().subtract_product(product_task(product, product.shape, 0, w));
}

// Modified Gram-Schmidt.
void orthogonalize(float* p, size_t rows, size_t rank) {
  DefaultFloatMode mode;
  for (size_t k = 0; k < rank; ++k) {
    const double before = std::sqrt(dot(p, rows, rank, k, k));
    // Twice: what is left of a column that nearly depends on the others is mostly rounding, which is not orthogonal to
    // them (Kahan; Parlett 1980, "The Symmetric Eigenvalue Problem": twice is enough).
    for (size_t other = 0; other < 2 * k; ++other) {
      const double along = dot(p, rows, rank, other % k, k);
      for (size_t row = 0; row < rows; ++row) {
        const double shadow = along * static_cast<double>(p[row * rank + other % k]);
        p[row * rank + k] = static_cast<float>(static_cast<double>(p[row * rank + k]) - shadow);
      }
    }
    const double length = std::sqrt(dot(p, rows, rank, k, k));
    const bool independent = length > kIndependent * before;
    for (size_t row = 0; row < rows; ++row) {
      float& element = p[row * rank + k];
      element = independent ? static_cast<float>(static_cast<double>(element) / length) : 0.0F;
    }
  }
}

void fill_with_noise(uint64_t seed, float* q, size_t count) {
  constexpr float kUnit = 1.0F / (1U << 23);
  for (size_t i = 0; i < count; ++i) q[i] = static_cast<float>(mixed(seed + i) >> 40) * kUnit - 1.0F;
}

}  // namespace perseus::kernels

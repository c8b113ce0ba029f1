// Products of a matrix with a few vectors, as a low-rank approximation needs them (Vogels et al. 2019, PowerSGD). Every
// SIMD variant gives the same bits, whatever the caller's floating-point mode. Thread-safe; no output overlaps an
// input.
//
// Matrices are dense: w has `rows` rows of `cols` elements; p has `rows` rows of `rank` elements, q `rank` rows of
// `cols` elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace perseus::kernels {

struct MatrixShape {
  size_t rows = 0, cols = 0;
};

// p q, of a matrix of this shape; without elements, nothing.
struct Product {
  MatrixShape shape;
  size_t rank = 0;
  std::vector<float> p, q;

  bool empty() const { return p.empty(); }
  void clear() {
    p.clear();
    q.clear();
  }
};

// p = w qᵀ
void project(const float* w, MatrixShape shape, const float* q, size_t rank, float* p);
// w = carry (w - sent) + x, and then the same, in one pass over memory.
void add_and_project(const float* x, float carry, const Product& sent, float* w, MatrixShape shape, const float* q,
                     size_t rank, float* p);
// q = pᵀ w
void project_back(const float* w, MatrixShape shape, const float* p, size_t rank, float* q);
// out = p q
void expand(const float* p, const float* q, MatrixShape shape, size_t rank, float* out);
// w = w - product, which is not empty
void subtract(const Product& product, float* w);

// What the sender of low-rank sums keeps from one step to the next, beside a residual.
struct LowRankMemory {
  std::vector<float> q;  // where the next sum begins; empty at first
  Product taken;         // of the residual: the next step subtracts it in its own pass over the residual

  void settle(float* residual) {
    if (!taken.empty()) subtract(taken, residual);
    taken.clear();
  }
};

// Makes the columns of p orthogonal and of length 1, in their order; those that depend on earlier ones become zero.
void orthogonalize(float* p, size_t rows, size_t rank);
// Numbers in [-1, 1) that depend on the seed alone.
void fill_with_noise(uint64_t seed, float* q, size_t count);

}  // namespace perseus::kernels

// Which gradients a low-rank sum serves (see collective/low_rank_allreduce.h), and as what matrices. Pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/low_rank.h"

namespace perseus {

// A tensor as the matrix of the same elements, in the same order, with the fewest rows and columns: a convolution's
// weights of the shape (out, in, height, width) have `out` rows, those of the shape (height, width, in, out) `out`
// columns.
kernels::MatrixShape matrix_of(const std::vector<int64_t>& shape);

// The bytes, as float32, of the two matrices of this rank that take the place of such a tensor; 0 if that is more than
// half of its elements.
uint64_t narrow_bytes(const std::vector<int64_t>& shape, int rank);

}  // namespace perseus

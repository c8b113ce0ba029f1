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

// Are two matrices of this rank at most half as large as one of that shape?
bool low_rank_pays(const kernels::MatrixShape& shape, int rank);

}  // namespace perseus

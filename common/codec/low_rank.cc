// Tensors as matrices.
#include "codec/low_rank.h"

namespace perseus {

kernels::MatrixShape matrix_of(const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (int64_t extent : shape) count *= static_cast<size_t>(extent);
  kernels::MatrixShape best{1, count};
  size_t rows = 1;
  for (int64_t extent : shape) {
    rows *= static_cast<size_t>(extent);
    if (rows == 0) break;
    if (rows + count / rows < best.rows + best.cols) best = {rows, count / rows};
  }
  return best;
}

bool low_rank_pays(const kernels::MatrixShape& shape, int rank) {
  const size_t r = static_cast<size_t>(rank);
  return 2 * r * (shape.rows + shape.cols) <= shape.rows * shape.cols;
}

}  // namespace perseus

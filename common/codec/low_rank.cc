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

uint64_t narrow_bytes(const std::vector<int64_t>& shape, int rank) {
  const kernels::MatrixShape matrix = matrix_of(shape);
  const uint64_t numbers = static_cast<uint64_t>(rank) * (matrix.rows + matrix.cols);
  return 2 * numbers <= matrix.rows * matrix.cols ? numbers * sizeof(float) : 0;
}

}  // namespace perseus

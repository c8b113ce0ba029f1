// The sum of gradients that are matrices, as a product of two narrow ones (PowerSGD: Vogels et al. 2019, "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization"). Of a matrix M with n rows and m columns,
// r (n + m) numbers travel between groups instead of n m: first P = M Qᵀ is summed, with the Q of the step before; its
// columns are made orthogonal; then Q = Pᵀ M is summed, and P Q is the result. What Pᵀ M leaves out of our M is kept
// for the next step.
//
// Inside a group matrices are summed exactly, each by one member, which sends it across. All that decides about the
// result's bits comes from sums that all have alike, and is computed alike on every machine: so the bits are the same.
#pragma once

#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/float_staging.h"
#include "collective/inner_exchanges.h"
#include "collective/staged.h"
#include "kernels/low_rank.h"

namespace perseus {

class LowRankAllreduce final : public Staged {
 public:
  explicit LowRankAllreduce(const Levels& levels);

  struct Matrix {
    Piece piece;
    kernels::MatrixShape shape;
    size_t rank = 1;                           // at most the smaller extent
    float* residual = nullptr;                 // of its elements; null = none is kept
    float carry = 1.0F;                        // what the residual is multiplied by first
    kernels::LowRankMemory* memory = nullptr;  // of the steps before; null = none is kept, as without a residual
    uint64_t salt = 0;                         // decides which member sends it
    uint64_t step = 0;                         // counts, the same on all ranks
  };

  // Begins anew: a sum of this dtype, which is a floating one, with factors.
  void start(const kernels::ReduceSpec& reduction) PERSEUS_REQUIRES(progress_lock);
  // Before the first next().
  void add(const Matrix& matrix) PERSEUS_REQUIRES(progress_lock) { matrices_.push_back(matrix); }
  bool next(Step* step) override PERSEUS_REQUIRES(progress_lock);
  int64_t codec_ns() const override PERSEUS_REQUIRES(progress_lock) { return codec_ns_; }
  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override
      PERSEUS_REQUIRES(progress_lock);

 private:
  enum class Stage { kInner, kProject, kProjectBack, kExpand, kBack, kDone };

  // One that this member sends.
  struct Sent {
    Matrix matrix;
    float* work;         // what is approximated; is the residual afterwards
    size_t p, q;         // where its numbers begin
    bool usable = true;  // its sums are finite
  };

  void load_floats() PERSEUS_REQUIRES(progress_lock);
  void plan_sum(std::vector<float>* numbers, Step* step);
  void project();
  void project_back();
  void expand();
  void expand(Sent* sent);
  void prepare_basis(const Matrix& matrix, float* q) const;
  bool works_inside() const { return levels_.inner.size() > 1; }

  const Levels levels_;
  const Level across_;  // which exchange goes across
  kernels::ReduceSpec reduction_;
  Stage stage_ = Stage::kInner;
  std::vector<Matrix> matrices_;
  Shards shards_;  // the matrices by the inner member that sends them
  std::vector<Sent> sent_;
  std::vector<float> p_, q_, own_q_;  // of all that this member sends
  FloatStaging staging_;
  std::vector<float> floats_;  // of other types than float32
  ExchangePlan plan_;
  int64_t codec_ns_ = 0;
};

}  // namespace perseus

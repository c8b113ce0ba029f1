// The two sums across, and what is computed between them.
#include "collective/low_rank_allreduce.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/codec_kernels.h"
#include "kernels/float_mode.h"

namespace perseus {
namespace {

bool all_finite(const float* x, size_t count) { return kernels::largest_magnitude(x, count) < kernels::kNotFinite; }

size_t elements(const kernels::MatrixShape& shape) { return shape.rows * shape.cols; }

}  // namespace

LowRankAllreduce::LowRankAllreduce(const Levels& levels)
    : levels_(levels),
      across_(static_cast<int>(levels.across.size()) == levels.members ? Level::kAll : Level::kAcross),
      shards_(static_cast<size_t>(levels.shards)) {}

void LowRankAllreduce::start(const kernels::ReduceSpec& reduction) {
  reduction_ = reduction;
  reduction_.dtype = DType::kFloat32;
  staging_.start(reduction.dtype);
  stage_ = Stage::kInner;
  matrices_.clear();
  sent_.clear();
  codec_ns_ = 0;
}

bool LowRankAllreduce::next(Step* step) {
  step->plan = &plan_;
  step->sizes_vary = false;
  if (stage_ == Stage::kInner) {
    load_floats();
    stage_ = Stage::kProject;
    if (works_inside()) {
      kernels::ReduceSpec sum = reduction_;
      sum.postscale = 1.0;
      sum.divisor = 1;
      plan_inner_sum(levels_, shards_, sum, &plan_);
      step->level = Level::kInner;
      return true;
    }
  }
  if (stage_ == Stage::kProject) {
    project();
    stage_ = sent_.empty() ? Stage::kBack : Stage::kProjectBack;
    if (!sent_.empty()) {
      plan_sum(&p_, step);
      return true;
    }
  }
  if (stage_ == Stage::kProjectBack) {
    project_back();
    stage_ = Stage::kExpand;
    plan_sum(&q_, step);
    return true;
  }
  if (stage_ == Stage::kExpand) {
    expand();
    stage_ = Stage::kBack;
  }
  if (stage_ == Stage::kBack) {
    stage_ = Stage::kDone;
    if (works_inside()) {
      plan_inner_spread(levels_, shards_, DType::kFloat32, &plan_);
      step->level = Level::kInner;
      return true;
    }
  }
  if (staging_.needed()) staging_.store();
  return false;
}

Byte* LowRankAllreduce::allocate(const std::vector<size_t>&, const std::vector<uint64_t>&) {
  fail(ErrorKind::kInternal, "[collective] all sizes of a low-rank sum are known");
}

// The matrices as floats, and who sends which.
void LowRankAllreduce::load_floats() {
  if (staging_.needed()) {
    for (const Matrix& matrix : matrices_) staging_.add(matrix.piece);
    staging_.load(&floats_);
    for (size_t i = 0; i < matrices_.size(); ++i) matrices_[i].piece = staging_.floats(i);
  }
  for (std::vector<Piece>& shard : shards_) shard.clear();
  size_t p = 0, q = 0;
  for (const Matrix& matrix : matrices_) {
    const size_t shard = matrix.salt % shards_.size();
    shards_[shard].push_back(matrix.piece);
    if (!levels_.carries() || shard != static_cast<size_t>(levels_.inner_me)) continue;
    sent_.push_back(Sent{matrix, nullptr, p, q});
    p += matrix.shape.rows * matrix.rank;
    q += matrix.shape.cols * matrix.rank;
  }
  p_.resize(p);
  q_.resize(q);
  own_q_.resize(q);
}

void LowRankAllreduce::plan_sum(std::vector<float>* numbers, Step* step) {
  plan_.clear();
  plan_.collective = Collective::kAllreduce;
  plan_.reduction = kernels::ReduceSpec();
  Byte* memory = reinterpret_cast<Byte*>(numbers->data());
  plan_.pieces.push_back(Piece{memory, memory, numbers->size() * sizeof(float)});
  step->level = across_;
}

// P of all matrices: of what they and earlier steps' residuals are together.
void LowRankAllreduce::project() {
  const int64_t begun = now_ns();
  for (Sent& sent : sent_) {
    const Matrix& matrix = sent.matrix;
    const size_t count = elements(matrix.shape);
    const Byte* from = works_inside() ? matrix.piece.out : matrix.piece.in;
    if (!works_inside() && (reduction_.prescale != 1.0 || matrix.residual == nullptr)) {
      kernels::ReduceSpec scale;
      scale.prescale = reduction_.prescale;
      const void* source = matrix.piece.in;
      kernels::reduce(scale, matrix.piece.out, nullptr, &source, 1, count, false);
      from = matrix.piece.out;
    }
    float *const q = q_.data() + sent.q, *const p = p_.data() + sent.p;
    prepare_basis(matrix, q);
    if (matrix.residual == nullptr) {
      sent.work = reinterpret_cast<float*>(matrix.piece.out);
      kernels::project(sent.work, matrix.shape, q, matrix.rank, p);
    } else {
      sent.work = matrix.residual;
      kernels::add_and_project(reinterpret_cast<const float*>(from), matrix.carry, matrix.memory->taken, sent.work,
                               matrix.shape, q, matrix.rank, p);
      matrix.memory->taken.clear();  // if the sums fail, nothing is to be subtracted again
    }
  }
  codec_ns_ += now_ns() - begun;
}

// The Q of the step before; in the place of vectors that are zero, as all are at first, such that lie anywhere.
void LowRankAllreduce::prepare_basis(const Matrix& matrix, float* q) const {
  const size_t cols = matrix.shape.cols;
  const bool known = matrix.memory != nullptr && matrix.memory->q.size() == matrix.rank * cols;
  for (size_t k = 0; k < matrix.rank; ++k, q += cols) {
    if (known) std::copy_n(matrix.memory->q.data() + k * cols, cols, q);
    if (!known || kernels::largest_magnitude(q, cols) == 0)
      kernels::fill_with_noise((matrix.salt + matrix.step * matrix.rank + k) << 32, q, cols);
  }
}

void LowRankAllreduce::project_back() {
  const int64_t begun = now_ns();
  for (Sent& sent : sent_) {
    const Matrix& matrix = sent.matrix;
    float *const p = p_.data() + sent.p, *const q = own_q_.data() + sent.q;
    sent.usable = all_finite(p, matrix.shape.rows * matrix.rank);
    if (!sent.usable) {
      std::fill_n(q, matrix.rank * matrix.shape.cols, 0.0F);
      continue;
    }
    kernels::orthogonalize(p, matrix.shape.rows, matrix.rank);
    kernels::project_back(sent.work, matrix.shape, p, matrix.rank, q);
  }
  q_ = own_q_;
  codec_ns_ += now_ns() - begun;
}

void LowRankAllreduce::expand() {
  const int64_t begun = now_ns();
  for (Sent& sent : sent_) expand(&sent);
  codec_ns_ += now_ns() - begun;
}

void LowRankAllreduce::expand(Sent* sent) {
  const Matrix& matrix = sent->matrix;
  const size_t count = elements(matrix.shape), numbers = matrix.rank * matrix.shape.cols;
  float* const out = reinterpret_cast<float*>(matrix.piece.out);
  float* const q = q_.data() + sent->q;
  if (!sent->usable || !all_finite(q, numbers)) {
    // A gradient that is not finite: so are all ranks' results, and the next step begins anew.
    std::fill_n(out, count, std::numeric_limits<float>::quiet_NaN());
    if (matrix.residual != nullptr) std::fill_n(matrix.residual, count, 0.0F);
    if (matrix.memory != nullptr) *matrix.memory = {};
    return;
  }
  const float* const p = p_.data() + sent->p;
  if (matrix.residual != nullptr) {
    const float* const own_q = own_q_.data() + sent->q;
    kernels::Product& taken = matrix.memory->taken;
    taken.shape = matrix.shape;
    taken.rank = matrix.rank;
    taken.p.assign(p, p + matrix.rank * matrix.shape.rows);
    taken.q.assign(own_q, own_q + numbers);
    matrix.memory->q.assign(q, q + numbers);
  }
  const float factor = static_cast<float>(reduction_.postscale / reduction_.divisor);
  if (factor != 1.0F) {
    const kernels::DefaultFloatMode mode;
    for (size_t i = 0; i < numbers; ++i) q[i] *= factor;
  }
  kernels::expand(p, q, matrix.shape, matrix.rank, out);
}

}  // namespace perseus

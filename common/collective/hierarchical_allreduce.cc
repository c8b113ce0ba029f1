// The stages and what each of them moves.
#include "collective/hierarchical_allreduce.h"

#include <algorithm>

namespace perseus {

HierarchicalAllreduce::HierarchicalAllreduce(const Levels& levels)
    : levels_(levels),
      across_(static_cast<int>(levels.across.size()) == levels.members ? Level::kAll : Level::kAcross),
      shards_(static_cast<size_t>(levels.shards)) {}

void HierarchicalAllreduce::start(const kernels::ReduceSpec& reduction, const WireFormat* format,
                                  const WireFormat* inside) {
  reduction_ = reduction;
  format_ = format;
  inside_ = works_inside() ? inside : nullptr;
  inside_only_ = false;
  algorithm_ = Algorithm::kPairwise;
  stage_ = Stage::kInner;
  pieces_.clear();
  for (std::vector<Piece>& shard : shards_) shard.clear();
  staged_.clear();
  encoding_ = nullptr;
  staging_.start(format != nullptr ? reduction.dtype : DType::kFloat32);
  if (format != nullptr) reduction_.dtype = DType::kFloat32;
  results_.clear();
  const float prescale = static_cast<float>(reduction.prescale),
              factor = static_cast<float>(reduction.postscale / reduction.divisor);
  if (inside_ != nullptr) {
    if (!compressed_inside_)
      compressed_inside_ =
          std::make_unique<CompressedAllreduce>(static_cast<int>(levels_.inner.size()), levels_.inner_me);
    compressed_inside_->start(*inside_, prescale, 1.0F, true);
    compressed_inside_->sum_only();
  }
  if (format == nullptr || !levels_.carries()) return;
  if (!compressed_)
    compressed_ = std::make_unique<CompressedAllreduce>(static_cast<int>(levels_.across.size()), levels_.across_me);
  const bool sends_outputs = works_inside() && inside_ == nullptr;
  compressed_->start(*format, works_inside() ? 1.0F : prescale, factor, !sends_outputs);
  if (inside_ != nullptr) compressed_->note_results(&results_);
}

void HierarchicalAllreduce::add(const Run& run) {
  if (!staging_.needed()) return add_floats(run);
  staging_.add(run.piece);
  staged_.push_back(run);
}

void HierarchicalAllreduce::use(CompressedBuffers* buffers, ThreadPool* threads) {
  if (format_ == nullptr) return;
  if (compressed_) compressed_->use(buffers, threads);
  if (inside_ != nullptr) compressed_inside_->use(buffers, threads);
  if (!staging_.needed()) return;
  staging_.load(&buffers->staging);
  for (size_t i = 0; i < staged_.size(); ++i) {
    staged_[i].piece = staging_.floats(i);
    add_floats(staged_[i]);
  }
}

void HierarchicalAllreduce::add_floats(const Run& run) {
  const size_t elements = run.piece.bytes / sizeof(float);
  const uint64_t shards = static_cast<uint64_t>(levels_.shards);
  if (levels_.carries()) compressed_->begin_slice();
  for (size_t begin = 0; begin < elements; begin += kWireChunk) {
    const uint64_t number = run.salt + run.number + begin / kWireChunk;
    const size_t count = std::min(kWireChunk, elements - begin);
    const Piece piece{run.piece.in + begin * sizeof(float), run.piece.out + begin * sizeof(float),
                      count * sizeof(float)};
    CompressedChunk chunk;
    chunk.in = reinterpret_cast<const float*>(piece.in);
    chunk.out = reinterpret_cast<float*>(piece.out);
    chunk.count = static_cast<uint32_t>(count);
    if (inside_ != nullptr) compressed_inside_->add(static_cast<int>(number % shards), chunk);
    else shards_[number % shards].push_back(piece);
    if (!carries(run, begin)) continue;
    if (works_inside()) chunk.in = chunk.out;
    if (run.residual != nullptr) chunk.residual = run.residual + begin;
    if (run.result_residual != nullptr) chunk.result_residual = run.result_residual + begin;
    chunk.carry = run.carry;
    chunk.momenta = run.momenta.from(begin);
    if (run.slots != nullptr) chunk.slot = run.slots + begin / kWireChunk * cuda::kSlotBytes;
    chunk.step = run.step;
    chunk.whole = run.joined && works_inside();  // else it is zeros
    chunk.result_whole = run.joined;
    if (inside_ != nullptr) {
      chunk.result = static_cast<uint32_t>(results_.size());
      results_.emplace_back();
    }
    compressed_->add(static_cast<int>(number / shards % levels_.across.size()), chunk);
  }
}

bool HierarchicalAllreduce::next(Step* step) {
  step->plan = &plan_;
  step->sizes_vary = false;
  if (stage_ == Stage::kInner) {
    if (inside_ != nullptr && next_encoded(step, compressed_inside_.get(), Level::kInner)) return true;
    if (format_ == nullptr) cut_into_shards();
    stage_ = Stage::kAcross;
    if (works_inside() && inside_ == nullptr) {
      plan_inner();
      step->level = Level::kInner;
      return true;
    }
  }
  if (stage_ == Stage::kAcross) {
    stage_ = levels_.carries() && format_ != nullptr ? Stage::kEncoded : Stage::kBack;
    if (inside_only_ && !works_inside()) reduce_alone();
    if (levels_.carries() && format_ == nullptr && !inside_only_) {
      plan_across();
      step->level = across_;
      return true;
    }
  }
  if (stage_ == Stage::kEncoded) {
    if (next_encoded(step, compressed_.get(), across_)) return true;
    stage_ = Stage::kBack;
  }
  if (stage_ == Stage::kBack && inside_ != nullptr) {
    stage_ = Stage::kSpread;
    step->plan = compressed_inside_->spread(*format_, results_);
    step->level = Level::kInner;
    step->sizes_vary = true;
    return true;
  }
  if (stage_ == Stage::kSpread) next_encoded(step, compressed_inside_.get(), Level::kInner);
  const bool back = stage_ == Stage::kBack && works_inside();
  stage_ = Stage::kDone;
  if (!back) {
    if (staging_.needed()) staging_.store();
    return false;
  }
  if (encoding_ != nullptr) encoding_->decode();
  plan_inner_spread(levels_, shards_, reduction_.dtype, &plan_);
  step->plan = &plan_;
  step->level = Level::kInner;
  step->sizes_vary = false;
  return true;
}

// False when it has no exchange to run now.
bool HierarchicalAllreduce::next_encoded(Step* step, CompressedAllreduce* compressed, Level level) const {
  step->plan = compressed->next();
  step->level = level;
  step->sizes_vary = true;
  return step->plan != nullptr;
}

// Of all pieces in a row; where a ring goes across, in which an element's place counts, of every tensor by itself.
void HierarchicalAllreduce::cut_into_shards() {
  if (algorithm_ != Algorithm::kRing) return perseus::cut_into_shards(pieces_.data(), pieces_.size(), &shards_);
  for (const Piece& piece : pieces_) perseus::cut_into_shards(&piece, 1, &shards_);
}

void HierarchicalAllreduce::plan_inner() {
  kernels::ReduceSpec reduction = reduction_;
  if (!inside_only_) {
    reduction.postscale = 1.0;
    reduction.divisor = 1;
  }
  plan_inner_sum(levels_, shards_, reduction, &plan_);
}

// The reduction of an inner group of one.
void HierarchicalAllreduce::reduce_alone() const {
  const bool scales = reduction_.prescale != 1.0 || reduction_.postscale != 1.0;
  for (const Piece& piece : pieces_) {
    if (piece.in == piece.out && !scales) continue;
    const void* source = piece.in;
    kernels::reduce(reduction_, piece.out, nullptr, &source, 1, piece.bytes / dtype_size(reduction_.dtype), false);
  }
}

void HierarchicalAllreduce::plan_across() {
  plan_.clear();
  plan_.collective = Collective::kAllreduce;
  plan_.algorithm = algorithm_;
  plan_.reduction = reduction_;
  plan_.pieces = shard();
  if (!works_inside() && reduction_.prescale == 1.0) return;
  // Those of other hosts come scaled.
  plan_.reduction.prescale = 1.0;
  kernels::ReduceSpec scale;
  scale.dtype = reduction_.dtype;
  scale.prescale = reduction_.prescale;
  for (Piece& piece : plan_.pieces) {
    const void* source = piece.in;
    const size_t count = piece.bytes / dtype_size(reduction_.dtype);
    if (!works_inside()) kernels::reduce(scale, piece.out, nullptr, &source, 1, count, false);
    piece.in = piece.out;
  }
}

Byte* HierarchicalAllreduce::allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) {
  return (stage_ == Stage::kEncoded ? compressed_ : compressed_inside_)->allocate(bytes, rows);
}

int64_t HierarchicalAllreduce::codec_ns() const {
  int64_t spent = inside_ == nullptr ? 0 : compressed_inside_->codec_ns();
  if (format_ != nullptr && compressed_) spent += compressed_->codec_ns();
  return spent;
}

}  // namespace perseus

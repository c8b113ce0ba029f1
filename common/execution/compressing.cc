// Allreduces that are encoded: which tensors, in what form, and what was held back of them.
#include <algorithm>

#include "base/error.h"
#include "base/hash.h"
#include "codec/low_rank.h"
#include "codec/top_k.h"
#include "execution/execution.h"

namespace perseus {
namespace {

// Spreads the owners of small tensors over the ranks, the same way everywhere.
uint64_t salt_of(const std::string& name) { return fnv1a(name) >> 1; }  // so that a number can be added

// Only where each bit is the exact sum's: of other types nothing is saved, or floats do not hold them; bfloat16 that is
// scaled before the sum would be rounded once more; small tensors are summed in another order.
bool keeps_every_bit(const Description& d, const TensorDescription& t) {
  const bool narrow = t.dtype == DType::kBFloat16 && d.prescale == 1.0;
  return (narrow || t.dtype == DType::kFloat32) && !is_flat(d, t.bytes());
}

static_assert(cuda::kChunkElements == kWireChunk && cuda::kShareElements == kWireShare,
              "GPUs and CPUs encode the same chunks");

// Of a codec that GPUs know.
cuda::ChunkForm form_of(const CodecSpec& codec) {
  switch (codec.kind) {
    case CodecKind::kTopK:
      return codec.half_values ? cuda::ChunkForm::kTopKHalves : cuda::ChunkForm::kTopK;
    case CodecKind::kBFloat16:
      return cuda::ChunkForm::kBFloat16;
    case CodecKind::kInt8:
      return cuda::ChunkForm::kInt8;
    case CodecKind::kInt4:
      return cuda::ChunkForm::kInt4;
    case CodecKind::kInt2:
      return cuda::ChunkForm::kInt2;
    default:
      return cuda::ChunkForm::kFloat16;
  }
}

}  // namespace

// Where nothing is summed before it is encoded, because each host has one member, or where NCCL does that. What was
// held back moves to page-locked memory for that.
bool Execution::encodes_on_device(Entry* entry, bool sums_there) {
  const Description& d = entry->description;
  if (!settings_.gpu_codecs || !entry->staging->of().encodes()) return false;
  if (d.prescale != 1.0 || d.flush != Flush::kNone || d.compression.inside) return false;
  size_t tensors = 0, with_residual = 0;
  for (size_t i = 0; i < d.tensors.size(); ++i) {
    if (d.tensors[i].bytes() == 0) continue;
    if (d.tensors[i].dtype != DType::kFloat32 || !encoded_by_gpus(codecs_[i].kind)) return false;
    if (d.compression.corrects(codecs_[i].kind)) return false;
    if (!sums_there && levels_of_encoded(*entry, i).inner.size() > 1) return false;
    ++tensors;
    if (format_of(codecs_[i])->keeps_residual()) ++with_residual;
  }
  if (with_residual > 0) {
    if (with_residual < tensors) return false;  // a CPU encodes all of them with what is held back

    take_residuals(entry);
    if (!entry->residuals || !lock_pages(entry)) return false;
  }
  return entry->staging->stay_encoded();
}

// False where there is no memory for that.
bool Execution::lock_pages(Entry* entry) {
  Residuals::Record& record = *entry->residuals.operator->();
  if (record.page_locked) return true;
  try {
    const std::shared_ptr<Byte> memory =
        page_locked_.allocate(&entry->staging->of(), 2 * record.begins.back() * sizeof(float));
    record.move_to(std::shared_ptr<float[]>(memory, reinterpret_cast<float*>(memory.get())));
  } catch (const Error&) {
    return false;
  }
  return true;
}

void Execution::add_compressed(Entry* entry, size_t tensor, const Levels& levels, const CodecSpec& codec) {
  const Description& d = entry->description;
  const TensorDescription& t = d.tensors[tensor];
  Fit fit(entry->buffers[tensor].device, Collective::kAllreduce, reduction_of(d, t.dtype, ranks_.size()));
  fit.stages = &levels == &this->levels(true) ? 0 : 1;
  fit.flushes = d.flush != Flush::kNone;
  if (!fit.flushes) fit.codec = codec;
  fit.compressed_inside = d.compression.inside && !fit.flushes && fit.stages == 1;
  const size_t element = dtype_size(t.dtype), slice = slice_bytes(fit.codec.kind) / sizeof(float) * element;
  fit.most_bytes = slice;
  const WireFormat* format = fit.flushes ? &whole_ : format_of(codec);
  const WireFormat* inside = fit.compressed_inside ? format_of(settings_.precision) : nullptr;
  if (format->keeps_residual()) take_residuals(entry);
  if (entry->residuals) {
    entry->residuals->settle(tensor);
    if (!fit.flushes && format->keeps_residual()) entry->residuals->held[tensor] = true;
  }
  // Among all, chunks are divided otherwise than last results.
  const bool corrects = d.compression.corrects(codec.kind) && entry->residuals && entry->residuals->momenta &&
                        d.flush != Flush::kAmongAll;
  HierarchicalAllreduce::Run run;
  run.salt = salt_of(*entry->text) + tensor;
  run.joined = entry->stand_in && format->keeps_residual();
  const size_t bytes = t.bytes();
  const bool on_device = entry->staging && entry->staging->encodes();
  const bool sums = levels.inner.size() > 1;  // before anything is encoded
  for (size_t begin = 0; begin < bytes; begin += slice) {
    const size_t size = std::min(slice, bytes - begin);
    Bucket& bucket = bucket_for(entry, size, fit);
    HierarchicalAllreduce& all_stages = open_stages(&bucket, levels, format, inside);
    if (on_device) {
      run.slots = entry->staging->slots(tensor, begin);
      if (bucket.encoding.empty()) bucket.encoding.start(form_of(codec), static_cast<float>(codec.scale));
      all_stages.use(&bucket.encoding);
    }
    if (on_device && !sums) {
      run.piece = Piece{run.slots, run.slots, size};
    } else {
      bucket.add_piece(*entry, tensor, begin, size);
      run.piece = bucket.plan.pieces.back();
    }
    run.number = begin / element / kWireChunk;
    if (entry->residuals) {
      run.residual = entry->residuals->sent(tensor) + begin / element;
      run.result_residual = entry->residuals->result(tensor) + begin / element;
      run.carry = entry->residuals->carry;
      if (corrects)
        run.momenta = Momenta{entry->residuals->velocity(tensor), entry->residuals->last_result(tensor),
                              static_cast<float>(d.compression.momentum), d.compression.masks_momentum}
                          .from(begin / element);
      run.step = entry->residuals->steps;
      if (bucket.residuals.empty() || !(bucket.residuals.back() == entry->residuals))
        bucket.residuals.push_back(entry->residuals);
    }
    all_stages.add(run);
    if (!on_device) continue;
    cuda::Encoding::Part part;
    part.staging = entry->staging.get();
    part.tensor = tensor;
    part.begin = begin;
    part.bytes = size;
    part.summed = sums;
    if (format->keeps_residual()) {
      part.residual = run.residual;
      part.owner = entry->residuals->memory;
      part.carry = run.carry;
    }
    if (!sums) {
      bucket.encoding.add(part);
      continue;
    }
    for (size_t at = 0; at < size; at += kWireChunk * element) {
      if (!all_stages.carries(run, at / element)) continue;
      cuda::Encoding::Part chunk = part;
      chunk.begin += at;
      chunk.bytes = std::min(kWireChunk * element, size - at);
      if (part.residual != nullptr) chunk.residual += at / element;
      bucket.encoding.add(chunk);
    }
  }
}

void Execution::add_low_rank(Entry* entry, size_t tensor, const Levels& levels, const CodecSpec& codec) {
  const Description& d = entry->description;
  const TensorDescription& t = d.tensors[tensor];
  Fit fit(entry->buffers[tensor].device, Collective::kAllreduce, reduction_of(d, t.dtype, ranks_.size()));
  fit.stages = &levels == &this->levels(true) ? 0 : 1;
  fit.codec = codec;
  take_residuals(entry);
  Bucket& bucket = bucket_for(entry, t.bytes(), fit);
  bucket.add_piece(*entry, tensor, 0, t.bytes());
  if (!bucket.low_rank) {
    bucket.low_rank = std::make_unique<LowRankAllreduce>(levels);
    bucket.low_rank->start(bucket.plan.reduction);
    bucket.staged = bucket.low_rank.get();
  }
  LowRankAllreduce::Matrix matrix;
  matrix.piece = bucket.plan.pieces.back();
  matrix.shape = matrix_of(t.shape);
  matrix.rank = static_cast<size_t>(codec.matrix_rank);
  matrix.salt = salt_of(*entry->text) + tensor;
  if (entry->residuals) {
    matrix.residual = entry->residuals->sent(tensor);
    matrix.carry = entry->residuals->carry;
    matrix.memory = &entry->residuals->low_rank[tensor];
    matrix.step = entry->residuals->steps;
    if (bucket.residuals.empty() || !(bucket.residuals.back() == entry->residuals))
      bucket.residuals.push_back(entry->residuals);
  }
  bucket.low_rank->add(matrix);
}

// What was held back of the entry's tensors, and room for what will be.
void Execution::take_residuals(Entry* entry) {
  if (entry->residuals || settings_.residuals == nullptr || entry->stand_in) return;
  const Description& d = entry->description;
  describe_tensors(d, &tensors_);
  const kernels::ReduceSpec reduction = reduction_of(d, DType::kFloat32, ranks_.size());
  const float factor = static_cast<float>(reduction.postscale / reduction.divisor);
  entry->residuals = settings_.residuals->take({entry->gradient_of, number_, *entry->text}, tensors_, d.compression,
                                               settings_.topology->layout(tensor_bytes(d), levels(true), levels(false)),
                                               d.flush, entry->learning_rate, factor);
  if (entry->residuals && d.compression.momentum != 0)
    settings_.residuals->begin_momenta(entry->residuals, *entry->text, d.new_momenta || d.flush == Flush::kAmongAll);
  if (entry->residuals && d.flush == Flush::kAmongAll) entry->residuals->join_parts(factor);
}

void Execution::give_up_other_shapes(const Entry& entry) {
  if (settings_.residuals == nullptr || settings_.residuals->bytes() == 0 || entry.stand_in) return;
  describe_tensors(entry.description, &tensors_);
  settings_.residuals->agreed({entry.gradient_of, number_, *entry.text}, tensors_);
}

// Those of an allreduce's tensors. NCCL sums floats as they are between hosts, too, unless somebody wants something
// else.
void Execution::choose_codecs(const Entry& entry) {
  const Description& d = entry.description;
  const bool by_default = !d.compression.automatic && !d.compression.doubles && !settings_.precision_chosen &&
                          d.compression.codec == settings_.precision;
  between_by_nccl_ = is_for_nccl(entry);
  if (between_by_nccl_ && by_default) {
    codecs_.assign(d.tensors.size(), CodecSpec());
    if (reduces_on_device(entry)) return;
  }
  codecs_.clear();
  for (size_t i = 0; i < d.tensors.size(); ++i)
    codecs_.push_back(d.tensors[i].bytes() == 0 ? CodecSpec() : codec_of(entry, i));
  // What the tuner gives NCCL goes as it would otherwise where NCCL does not do it.
  const bool by_tuner = settings_.gpu_operations == GpuOperations::kAuto;
  if (between_by_nccl_ && by_tuner && !reduces_on_device(entry)) between_by_nccl_ = false;
}

// Which gradients are NCCL's is decided when each comes for the first time, so that what it has by then is as close to
// its part as whole gradients allow.
bool Execution::is_for_nccl(const Entry& entry) {
  if (settings_.gpu_operations != GpuOperations::kAuto) return settings_.gpu_operations == GpuOperations::kNccl;
  const Description& d = entry.description;
  // A replayed choice may come from ranks that had NCCL.
  const int percent = settings_.topology->nccl_between() ? in_force_.tuning.nccl_percent : 0;
  if (!d.gradient || !d.stays_on_device || percent == 0) return false;
  if (percent == 100) return true;
  if (percent != percent_of_ways_) {
    percent_of_ways_ = percent;
    ways_.clear();
    owed_ = 0;
  }
  const auto [way, is_new] = ways_.emplace(*entry.text, false);
  if (is_new) {
    int64_t bytes = 0;
    for (const TensorDescription& tensor : d.tensors) bytes += static_cast<int64_t>(tensor.bytes());
    owed_ += bytes * percent;
    way->second = owed_ >= bytes * 50;
    if (way->second) owed_ -= bytes * 100;
  }
  return way->second;
}

// By what all ranks know of the tensor, never by what it shares a bucket with. What leaves elements out does so between
// groups only; where there is one group, so does everything but PERSEUS_ALLREDUCE_DTYPE=0, and a rank alone only
// copies.
CodecSpec Execution::codec_of(const Entry& entry, size_t tensor) {
  const Description& d = entry.description;
  const TensorDescription& t = d.tensors[tensor];
  const bool between = levels(false).groups > 1;
  if (!between && (!d.compression.inside || ranks_.size() == 1)) return CodecSpec();
  if (d.compression.codec.kind == CodecKind::kInside) return between ? d.compression.codec : CodecSpec();
  if (!d.compression.serves(t.dtype)) return CodecSpec();
  const bool low_rank = d.compression.codec.kind == CodecKind::kLowRank;
  const uint64_t narrow = low_rank ? narrow_bytes(t.shape, d.compression.codec.matrix_rank) : 0;
  if (d.compression.automatic) {
    const bool staged = settings_.topology->stages(t.bytes());
    const int least = d.proportional ? kAutoCodecs - 1 : kAutoForAll;
    const bool flushes = d.flush != Flush::kNone;
    const auto [codec, yields] = automatic_->choose(*entry.text, tensor, t.bytes(), least, staged, flushes);
    const CodecSpec& chosen = settings_.auto_codecs[static_cast<size_t>(codec)];
    if (settings_.residuals == nullptr) return chosen;
    // The choice, alike on all ranks, goes by names. Only this rank knows whose gradient held something back under it,
    // and one rank's flush is all ranks'.
    const Residuals::Key key{entry.gradient_of, number_, *entry.text};
    const bool stays = !flushes && !keeps_residual(chosen) && settings_.residuals->holds(key, tensor);
    if (yields || stays) settings_.residuals->flush(key);
    return chosen;
  }
  bool large = t.bytes() >= d.compression.from;
  if (between && !large && d.compression.codec.kind == CodecKind::kTopK && t.bytes() < TopKFormat::kSmallTensor)
    return CodecSpec();
  if (between && low_rank) {
    if (narrow > 0 && !d.warms_up) return d.compression.codec;
    large = false;
  }
  CodecSpec codec = between && large ? d.compression.codec : settings_.precision;
  if (codec.kind == CodecKind::kLossless) {
    codec.half_values = t.dtype == DType::kBFloat16;
    return keeps_every_bit(d, t) ? codec : CodecSpec();
  }
  const bool halves = codec.kind == CodecKind::kFloat16 || codec.kind == CodecKind::kBFloat16;
  return halves && dtype_size(t.dtype) == 2 ? CodecSpec() : codec;
}

const WireFormat* Execution::format_of(const CodecSpec& codec) {
  for (auto& [spec, format] : formats_)
    if (spec == codec) return format.get();
  formats_.emplace_back(codec, make_codec(codec));
  return formats_.back().second.get();
}

}  // namespace perseus

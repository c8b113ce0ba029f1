// The largest elements of a gradient; the others wait in the residual. Thread-safe: no state that changes.
//
//   chunk     = bytes:u32 n:u16 kind:u16 [unscale:f32] positions values      the last three only where n > 0
//   positions = index:u16[n] pad                            kind 0: rising
//             | bits:u32[ceil(count / 32)]                  kind 1: where that is shorter; n bits are set
//   values    = f32[n]  or, with f16 values, u16[n] pad     unscale stands in front of these alone; see half.h
//   or          bytes:u32 kDenseForm:u32 f32[count]         where that is no longer, or an element is Inf or NaN
//
// Of a slice's `count` elements the k = ratio * count (at least 1) largest by magnitude are sent, or up to k / 4 more,
// never a zero; of equal ones that are too many, those with the lowest indices. The threshold, one for the slice, comes
// from a sample and is corrected by counting: nothing is sorted. (One per chunk loses accuracy where some rows of a
// matrix get larger gradients than others.)
//
// A result is everything that any member sent, as long as that is at most kResultGrowth times what the one that sent
// most sent: always, for so many members. Beyond, the largest elements are selected again. (Selecting k of them again
// delays every element twice, which loses accuracy; see docs/algorithms.md.)
//
// In the first `warm_up` steps a ratio below kWarmUpBelow falls to its value exponentially from kFirstRatio on: so Deep
// Gradient Compression (Lin et al. 2018) treats gradients that change fast.
#pragma once

#include "collective/wire_format.h"
#include "kernels/codec_kernels.h"

namespace perseus {

class TopKFormat : public WireFormat {
 public:
  static constexpr double kWarmUpBelow = 0.05, kFirstRatio = 0.25;
  static constexpr size_t kResultGrowth = 8;
  // Bytes: biases and norms, which matter more than their size, are smaller. They go as they are, unless a setting
  // wants tensors of their size to be sent in parts.
  static constexpr size_t kSmallTensor = 8 * 1024;

  TopKFormat(double ratio, bool half_values, int warm_up)
      : ratio_(ratio), half_values_(half_values), warm_up_(static_cast<uint64_t>(warm_up)) {}

  size_t most_bytes(size_t count) const override;
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  size_t encode_whole(const float* x, size_t count, Byte* to) const override;
  size_t encode_result(const float* x, float* residual, size_t count, uint64_t step,
                       const std::vector<const Byte*>& parts, Byte* to) const override;
  bool selects() const override { return true; }
  void select(ChunkSelection* chunks, size_t n, uint64_t step, ThreadPool* threads,
              std::vector<uint16_t>* indices) const override;
  size_t encode_selected(const ChunkSelection& chunk, const uint16_t* indices, Byte* to) const override;
  void check(const Byte* from, size_t bytes, size_t count) const override;
  void decode(const Byte* from, size_t bytes, size_t count, float* x) const override;
  void decode_add(const Byte* from, size_t bytes, size_t count, float* x) const override;
  bool keeps_residual() const override { return true; }

 private:
  struct Sparse;

  // How many of the elements are sent in a step, the first of which is 1.
  size_t elements_sent(size_t count, uint64_t step) const;
  // Bytes of a sparse chunk, header included.
  size_t sparse_bytes(size_t n, size_t count) const;
  // What a chunk that is not dense holds.
  void parse(const Byte* from, size_t bytes, size_t count, uint32_t form, Sparse* sparse) const;

  const double ratio_;
  const bool half_values_;
  const uint64_t warm_up_;
};

}  // namespace perseus

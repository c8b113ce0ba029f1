// A part of a gradient in each step, another one in the next; the others wait in the residual. Thread-safe: no state
// that changes.
//
//   chunk = bytes:u32 first:u32 f32*                      blocks first, first + N, first + 2N, … of the chunk
//   or      bytes:u32 kDenseForm:u32 f32[count]           where an element is Inf or NaN
//
// A block is 16 elements, the last one of a chunk what is left. Block b is sent in the steps with (b + step) mod N = 0:
// on all ranks the same, so no positions travel. In each step residual = momentum * residual + x, and what is sent
// leaves it: "decoded + residual equals x + residual before" holds with momentum * residual, so as it stands only for a
// momentum of 1. Without a residual what is not sent is lost.
#pragma once

#include "collective/wire_format.h"
#include "kernels/codec_kernels.h"

namespace perseus {

class RotatingFormat : public WireFormat {
 public:
  RotatingFormat(int every, double momentum)
      : every_(static_cast<uint32_t>(every)), momentum_(static_cast<float>(momentum)) {}

  size_t most_bytes(size_t count) const override;
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  size_t encode_whole(const float* x, size_t count, Byte* to) const override;
  void decode(const Byte* from, size_t bytes, size_t count, float* x) const override;
  void decode_add(const Byte* from, size_t bytes, size_t count, float* x) const override;
  bool keeps_residual() const override { return true; }

 private:
  // Calls visit(begin, count) for each run of elements that is sent when block `first` is the first one.
  template <class Visit>
  void for_sent(uint32_t first, size_t count, const Visit& visit) const;
  // Of a chunk that is not dense, header included.
  size_t sparse_bytes(uint32_t first, size_t count) const;
  // Where a valid chunk is not dense; false where it is.
  bool is_sparse(const Byte* from, size_t bytes, size_t count, uint32_t* first) const;

  const uint32_t every_;
  const float momentum_;
};

}  // namespace perseus

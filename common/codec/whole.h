// Gradients as they are, with all that was held back of them: the one step between two codecs. Thread-safe: no state.
//
//   chunk = bytes:u32 kDenseForm:u32 f32[count]
#pragma once

#include "collective/wire_format.h"

namespace perseus {

class WholeFormat : public WireFormat {
 public:
  size_t most_bytes(size_t count) const override;
  // x + residual as a float; nothing stays.
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  void decode(const Byte* from, size_t bytes, size_t count, float* x) const override;
  void decode_streamed(const Byte* from, size_t bytes, size_t count, float* x) const override;
  void decode_add(const Byte* from, size_t bytes, size_t count, float* x) const override;
  bool keeps_residual() const override { return true; }
};

}  // namespace perseus

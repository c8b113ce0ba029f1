// Codecs whose chunks give a value for every element: one function decodes them, wherever the values are to arrive.
#pragma once

#include "collective/wire_format.h"
#include "kernels/codec_kernels.h"

namespace perseus {

class EveryElementFormat : public WireFormat {
 public:
  void decode(const Byte* from, size_t bytes, size_t count, float* x) const final {
    decode_as(kernels::Arrival::kStore, from, bytes, count, x);
  }
  void decode_streamed(const Byte* from, size_t bytes, size_t count, float* x) const final {
    decode_as(kernels::Arrival::kStream, from, bytes, count, x);
  }
  void decode_add(const Byte* from, size_t bytes, size_t count, float* x) const final {
    decode_as(kernels::Arrival::kAdd, from, bytes, count, x);
  }

 private:
  virtual void decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const = 0;
};

}  // namespace perseus

// What codecs have in common.
#include "collective/wire_format.h"

#include "kernels/kernels.h"

namespace perseus {

// For formats that write here and there: composed in the cache, then stored in one go.
void WireFormat::decode_streamed(const Byte* from, size_t bytes, size_t count, float* x) const {
  float chunk[kWireChunk];
  decode(from, bytes, count, chunk);
  kernels::copy(x, chunk, count * sizeof(float), true);
}

}  // namespace perseus

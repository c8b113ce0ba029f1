// The kernels for aarch64, whose baseline has NEON with f16 conversions. Thread-safe.
#include <arm_neon.h>

#include <cstddef>

namespace perseus::kernels {
namespace {
constexpr size_t kVectorBytes = 16;
}
}  // namespace perseus::kernels

#include "kernels/lanes.h"

namespace perseus::kernels {
namespace {

PERSEUS_INLINE Floats half_decode(Halves from) { return same_bits<Floats>(vcvt_f32_f16(same_bits<float16x4_t>(from))); }
PERSEUS_INLINE Halves half_encode(Floats from) { return same_bits<Halves>(vcvt_f16_f32(same_bits<float32x4_t>(from))); }
PERSEUS_INLINE Halves narrow(FloatBits from) { return __builtin_convertvector(from, Halves); }
PERSEUS_INLINE uint32_t lane_bits(Ints mask) {
  constexpr FloatBits kBitOfLane = {1, 2, 4, 8};
  return vaddvq_u32(same_bits<uint32x4_t>(same_bits<FloatBits>(mask) & kBitOfLane));
}
PERSEUS_INLINE uint64_t byte_bits(Vector<uint8_t> mask) {
  constexpr Vector<uint8_t> kBitOfLane = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bits = same_bits<uint8x16_t>(mask & kBitOfLane);
  return vaddv_u8(vget_low_u8(bits)) | static_cast<uint64_t>(vaddv_u8(vget_high_u8(bits))) << 8;
}

// Normal stores: these machines recognise a stream by themselves.
template <class V>
PERSEUS_INLINE void stream_vector(unsigned char* to, V value) {
  store_vector(to, value);
}
PERSEUS_INLINE void stream_fence() {}

}  // namespace
}  // namespace perseus::kernels

#include "kernels/codec_table.h"
#include "kernels/copy_loops.h"
#include "kernels/gradient_loops.h"
#include "kernels/low_rank_loops.h"
#include "kernels/reduce_dispatch.h"

namespace perseus::kernels {
const Variant kNeon{"neon", reduce_any, copy_any, has_nan_any, sum_halves, kCodecKernels, kLowRankKernels};
}  // namespace perseus::kernels

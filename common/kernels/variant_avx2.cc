// The kernels for x86-64 with AVX2 and F16C. Thread-safe.
#include <immintrin.h>

#include <cstddef>

namespace perseus::kernels {
namespace {
constexpr size_t kVectorBytes = 32;
}
}  // namespace perseus::kernels

#include "kernels/lanes.h"

namespace perseus::kernels {
namespace {

PERSEUS_INLINE Floats half_decode(Halves from) { return _mm256_cvtph_ps(same_bits<__m128i>(from)); }
PERSEUS_INLINE Halves half_encode(Floats from) {
  return same_bits<Halves>(_mm256_cvtps_ph(from, _MM_FROUND_TO_NEAREST_INT));
}
// Packing works within halves of 128 bits: their lower quarters belong side by side.
PERSEUS_INLINE Halves narrow(FloatBits from) {
  __m256i packed = _mm256_packus_epi32(same_bits<__m256i>(from), _mm256_setzero_si256());
  return same_bits<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
PERSEUS_INLINE uint32_t lane_bits(Ints mask) {
  return static_cast<uint32_t>(_mm256_movemask_ps(same_bits<__m256>(mask)));
}
PERSEUS_INLINE uint64_t byte_bits(Vector<uint8_t> mask) {
  return static_cast<uint32_t>(_mm256_movemask_epi8(same_bits<__m256i>(mask)));
}

template <class V>
PERSEUS_INLINE void stream_vector(unsigned char* to, V value) {
  if constexpr (sizeof(V) == 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), same_bits<__m256i>(value));
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), same_bits<__m128i>(value));
  }
}
PERSEUS_INLINE void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace perseus::kernels

#include "kernels/codec_table.h"
#include "kernels/copy_loops.h"
#include "kernels/gradient_loops.h"
#include "kernels/low_rank_loops.h"
#include "kernels/reduce_dispatch.h"

namespace perseus::kernels {
const Variant kAvx2{"avx2", reduce_any, copy_any, has_nan_any, sum_halves, kCodecKernels, kLowRankKernels};
}  // namespace perseus::kernels

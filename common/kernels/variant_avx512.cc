// The kernels for x86-64 with AVX-512 (F, BW, VL, DQ). Thread-safe.
#include <immintrin.h>

#include <cstddef>

namespace perseus::kernels {
namespace {
constexpr size_t kVectorBytes = 64;
}
}  // namespace perseus::kernels

#include "kernels/lanes.h"

namespace perseus::kernels {
namespace {

// The forms with a mask of ones: the plain ones start from an undefined vector, of which g++ warns.
PERSEUS_INLINE Floats half_decode(Halves from) { return _mm512_maskz_cvtph_ps(0xffff, same_bits<__m256i>(from)); }
PERSEUS_INLINE Halves half_encode(Floats from) {
  return same_bits<Halves>(_mm512_maskz_cvtps_ph(0xffff, from, _MM_FROUND_TO_NEAREST_INT));
}
PERSEUS_INLINE Halves narrow(FloatBits from) {
  return same_bits<Halves>(_mm512_maskz_cvtepi32_epi16(0xffff, same_bits<__m512i>(from)));
}
PERSEUS_INLINE uint32_t lane_bits(Ints mask) { return _mm512_movepi32_mask(same_bits<__m512i>(mask)); }
PERSEUS_INLINE uint64_t byte_bits(Vector<uint8_t> mask) { return _mm512_movepi8_mask(same_bits<__m512i>(mask)); }

template <class V>
PERSEUS_INLINE void stream_vector(unsigned char* to, V value) {
  if constexpr (sizeof(V) == 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), same_bits<__m512i>(value));
  } else {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), same_bits<__m256i>(value));
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
const Variant kAvx512{"avx512", reduce_any, copy_any, has_nan_any, sum_halves, kCodecKernels, kLowRankKernels};
}  // namespace perseus::kernels

// The kernels with nothing but what every machine of this architecture has. Thread-safe.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>

namespace perseus::kernels {
namespace {
constexpr size_t kVectorBytes = 16;
}
}  // namespace perseus::kernels

#include "kernels/half_lanes.h"
#include "kernels/lanes.h"

namespace perseus::kernels {
namespace {

PERSEUS_INLINE Halves narrow(FloatBits from) { return __builtin_convertvector(from, Halves); }

#if defined(__x86_64__)
PERSEUS_INLINE uint32_t lane_bits(Ints mask) { return static_cast<uint32_t>(_mm_movemask_ps(same_bits<__m128>(mask))); }
PERSEUS_INLINE uint64_t byte_bits(Vector<uint8_t> mask) {
  return static_cast<uint32_t>(_mm_movemask_epi8(same_bits<__m128i>(mask)));
}

template <class V>
PERSEUS_INLINE void stream_vector(unsigned char* to, V value) {
  if constexpr (sizeof(V) == 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), same_bits<__m128i>(value));
  } else {
    _mm_stream_si64(reinterpret_cast<long long*>(to), same_bits<long long>(value));
  }
}
PERSEUS_INLINE void stream_fence() { _mm_sfence(); }
#else
PERSEUS_INLINE uint32_t lane_bits(Ints mask) {
  uint32_t bits = 0;
  for (size_t lane = 0; lane < kFloatLanes; ++lane) bits |= (static_cast<uint32_t>(mask[lane]) & 1) << lane;
  return bits;
}
PERSEUS_INLINE uint64_t byte_bits(Vector<uint8_t> mask) {
  uint64_t bits = 0;
  for (size_t lane = 0; lane < kVectorBytes; ++lane) bits |= (uint64_t{mask[lane]} & 1) << lane;
  return bits;
}

template <class V>
PERSEUS_INLINE void stream_vector(unsigned char* to, V value) {
  store_vector(to, value);
}
PERSEUS_INLINE void stream_fence() {}
#endif

}  // namespace
}  // namespace perseus::kernels

#include "kernels/codec_table.h"
#include "kernels/copy_loops.h"
#include "kernels/gradient_loops.h"
#include "kernels/low_rank_loops.h"
#include "kernels/reduce_dispatch.h"

namespace perseus::kernels {
const Variant kPortable{"portable", reduce_any, copy_any, has_nan_any, sum_halves, kCodecKernels, kLowRankKernels};
}  // namespace perseus::kernels

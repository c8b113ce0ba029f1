// Kernels that encode and decode chunks of gradients, compiled as kernels.cu is.
//
// A warp works on a share of a chunk. Compiled for the host, where threads take turns, the first thread of a warp does
// the work of all its lanes, and holds the values of each. Arithmetic is that of the CPU's codecs, bit for bit: nothing
// is contracted (--fmad=false), and NaNs keep their payload, which a GPU's own arithmetic would drop.
#include "base/half.h"
#include "base/integer_blocks.h"
#include "cuda/chunk_list.h"

#ifndef PERSEUS_TRANSLATED
#define PERSEUS_TRANSLATED(address, bytes) reinterpret_cast<void*>(address)
#endif

namespace {

using namespace perseus;
using namespace perseus::cuda;

#ifdef __CUDACC__
constexpr uint32_t kHeld = 1;
__device__ bool works() { return true; }
// Calls body(lane, its place among what the thread holds).
template <class Body>
__device__ void for_lanes(const Body& body) {
  body(threadIdx.x % kWarp, 0);
}
// The largest of `kLanes` lanes that lie side by side, in each of them.
template <uint32_t kLanes>
__device__ void to_largest(uint32_t (&values)[kHeld]) {
  for (uint32_t apart = kLanes / 2; apart > 0; apart /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, values[0], apart);
    values[0] = values[0] < other ? other : values[0];
  }
}
// Each lane gets the sum of its own value and those of the lanes before it. Gives the sum of all.
__device__ uint32_t to_running_sums(uint32_t (&values)[kHeld]) {
  for (uint32_t apart = 1; apart < kWarp; apart *= 2) {
    const uint32_t before = __shfl_up_sync(0xffffffff, values[0], apart);
    if (threadIdx.x % kWarp >= apart) values[0] += before;
  }
  return __shfl_sync(0xffffffff, values[0], kWarp - 1);
}
// What lanes have written, the others of the warp may write over.
__device__ void meet() { __syncwarp(); }
__device__ uint32_t ones_of(uint32_t bits) { return static_cast<uint32_t>(__popc(bits)); }
__device__ uint32_t lowest_one_of(uint32_t bits) { return static_cast<uint32_t>(__ffs(bits) - 1); }
#else
constexpr uint32_t kHeld = kWarp;
bool works() { return threadIdx.x % kWarp == 0; }
template <class Body>
void for_lanes(const Body& body) {
  for (uint32_t lane = 0; lane < kWarp; ++lane) body(lane, lane);
}
template <uint32_t kLanes>
void to_largest(uint32_t (&values)[kHeld]) {
  for (uint32_t first = 0; first < kWarp; first += kLanes) {
    uint32_t largest = 0;
    for (uint32_t lane = first; lane < first + kLanes; ++lane)
      largest = largest < values[lane] ? values[lane] : largest;
    for (uint32_t lane = first; lane < first + kLanes; ++lane) values[lane] = largest;
  }
}
uint32_t to_running_sums(uint32_t (&values)[kHeld]) {
  for (uint32_t lane = 1; lane < kWarp; ++lane) values[lane] += values[lane - 1];
  return values[kWarp - 1];
}
void meet() {}
uint32_t ones_of(uint32_t bits) { return static_cast<uint32_t>(__builtin_popcount(bits)); }
uint32_t lowest_one_of(uint32_t bits) { return static_cast<uint32_t>(__builtin_ctz(bits)); }
#endif

constexpr uint32_t kNotFinite = 0x7f800000, kQuiet = 0x400000, kHeaderBytes = 8;

template <class T>
__device__ T* translated_to(uint64_t address, uint64_t elements) {
  return static_cast<T*>(PERSEUS_TRANSLATED(address, elements * sizeof(T)));
}

__device__ uint32_t magnitude(float value) { return float_bits(value) & 0x7fffffff; }
__device__ bool is_nan(float value) { return magnitude(value) > kNotFinite; }
__device__ float quiet(float nan) { return float_from_bits(float_bits(nan) | kQuiet); }
__device__ float product(float value, float factor) { return is_nan(value) ? quiet(value) : value * factor; }

// The part of a chunk that this warp works on.
struct Share {
  const ChunkRun* run;
  uint32_t number;                      // of all
  uint32_t chunk, in_chunk;             // of the run, of the chunk
  uint32_t chunk_elements, begin, end;  // elements of the chunk

  __device__ uint64_t first() const { return static_cast<uint64_t>(chunk) * kChunkElements; }
  __device__ uint64_t slot() const { return run->slots + static_cast<uint64_t>(chunk) * kSlotBytes; }
  // From the share's first element on.
  __device__ float* x() const { return translated_to<float>(run->x + (first() + begin) * sizeof(float), end - begin); }
  __device__ float* residual() const {
    if (run->residual == 0) return nullptr;
    return translated_to<float>(run->residual + (first() + begin) * sizeof(float), end - begin);
  }
};

__device__ bool find_share(const ChunkList& list, Share* share) {
  share->number = blockIdx.x * kSharesInBlock + threadIdx.x / kWarp;
  if (list.count == 0 || !works()) return false;
  uint32_t first = 0, behind = list.count;
  while (behind - first > 1) {
    const uint32_t middle = (first + behind) / 2;
    if (list.runs[middle].first_share <= share->number) first = middle;
    else behind = middle;
  }
  share->run = &list.runs[first];
  const uint32_t in_run = share->number - share->run->first_share;
  share->chunk = in_run / kSharesInChunk;
  share->in_chunk = in_run % kSharesInChunk;
  if (share->first() >= share->run->count) return false;
  const uint64_t left = share->run->count - share->first();
  share->chunk_elements = static_cast<uint32_t>(left < kChunkElements ? left : kChunkElements);
  share->begin = share->in_chunk * kShareElements;
  if (share->begin >= share->chunk_elements) return false;
  const uint32_t end = share->begin + kShareElements;
  share->end = end < share->chunk_elements ? end : share->chunk_elements;
  return true;
}

__device__ void put_header(const Share& share, uint32_t bytes, uint32_t form) {
  uint32_t* const header = translated_to<uint32_t>(share.slot(), 2);
  for_lanes([&](uint32_t lane, uint32_t) {
    if (lane == 0) header[0] = bytes;
    if (lane == 1) header[1] = form;
  });
}

__device__ uint32_t halves_bytes(uint32_t count) { return kHeaderBytes + (count + 1) / 2 * 4; }

// Behind the halves that will be in a slot: two magnitudes of each share, the second of what is finite.
__device__ uint32_t* magnitudes_of(const Share& share, uint32_t first, uint32_t shares) {
  return translated_to<uint32_t>(share.slot() + halves_bytes(share.chunk_elements) + first * 8, 2 * shares);
}

__device__ float scale_of(const ChunkList& list, const Share& share) {
  if (list.form == ChunkForm::kBFloat16) return 1.0f;
  if (list.scale != 0.0f) return list.scale;
  const uint32_t shares = (share.chunk_elements + kShareElements - 1) / kShareElements;
  const uint32_t* const largest = magnitudes_of(share, 0, shares);
  uint32_t of_all = 0, of_finite = 0;
  for (uint32_t i = 0; i < shares; ++i) {
    of_all = of_all < largest[2 * i] ? largest[2 * i] : of_all;
    of_finite = of_finite < largest[2 * i + 1] ? largest[2 * i + 1] : of_finite;
  }
  return half_scale(of_all < kNotFinite ? of_all : of_finite);
}

// Blocks of a share: word w has the elements w, w + part, w + 2 part, … of its block. A lane holds words of one block;
// with 2 bits, half a warp is enough for a block.
template <uint32_t kBits>
struct IntegerShare {
  static constexpr uint32_t kElements = kInWord<kBits>, kWords = kPartOf<kBits>;
  static constexpr uint32_t kLanes = kWords < kWarp ? kWords : kWarp;  // of a block
  static constexpr uint32_t kOfLane = kWords / kLanes;                 // words
  static constexpr uint32_t kAtOnce = kWarp / kLanes;                  // blocks
  static constexpr uint32_t kScaleGroups = kScales<kBits>;

  // Of a block in the chunk: its elements, and the words that these take.
  struct Block {
    uint32_t begin, count, part;
    __device__ Block(const Share& share, uint32_t number) : begin(number * kIntegerBlock), count(0), part(0) {
      if (begin >= share.end) return;
      count = share.end - begin < kIntegerBlock ? share.end - begin : kIntegerBlock;
      part = (count + kElements - 1) / kElements;
    }
    // Of a word's p-th element, in the block; `count` where there is none.
    __device__ uint32_t place(uint32_t word, uint32_t p) const {
      const uint32_t at = p * part + word;
      return word < part && at < count ? at : count;
    }
  };
};

template <uint32_t kBits>
__device__ void put_scale(unsigned char* to, uint32_t bits) {
  if (kBits == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits >> 16);
  else *reinterpret_cast<uint32_t*>(to) = bits;
}
template <uint32_t kBits>
__device__ float get_scale(const unsigned char* from) {
  return float_from_bits(kBits == 2 ? static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(from)) << 16
                                    : *reinterpret_cast<const uint32_t*>(from));
}

// Where a chunk in a slot has its scales and words.
template <uint32_t kBits>
struct IntegerChunk {
  uint32_t bytes;
  unsigned char* scales;
  uint32_t* words;

  __device__ explicit IntegerChunk(const Share& share) {
    const uint32_t count = share.chunk_elements;
    const uint32_t scales_bytes = static_cast<uint32_t>(integer_scales_bytes(kBits, count));
    bytes = kHeaderBytes + scales_bytes + static_cast<uint32_t>(integer_bytes(kBits, count));
    scales = translated_to<unsigned char>(share.slot(), bytes) + kHeaderBytes;
    words = reinterpret_cast<uint32_t*>(scales + scales_bytes);
  }
};

// A block with an element that is not finite gets scales that are not, and leaves x + residual in the residual: the
// host, which sees that, sends the chunk as it is (see IntegerFormat::take_over).
template <uint32_t kBits>
__device__ void encode_integers(const Share& share) {
  using Shape = IntegerShare<kBits>;
  const IntegerChunk<kBits> chunk(share);
  if (share.in_chunk == 0) put_header(share, chunk.bytes, 0);
  const float* const x = share.x();
  float* const residual = share.residual();
  const float carry = share.run->carry;
  float v[kHeld][Shape::kOfLane * Shape::kElements];
  uint32_t largest[Shape::kScaleGroups][kHeld];
  for (uint32_t first = share.begin / kIntegerBlock; first * kIntegerBlock < share.end; first += Shape::kAtOnce) {
    for_lanes([&](uint32_t lane, uint32_t held) {
      const typename Shape::Block block(share, first + lane / Shape::kLanes);
      for (uint32_t group = 0; group < Shape::kScaleGroups; ++group) largest[group][held] = 0;
      for (uint32_t w = 0; w < Shape::kOfLane; ++w)
        for (uint32_t p = 0; p < Shape::kElements; ++p) {
          const uint32_t at = block.place(lane % Shape::kLanes + w * Shape::kLanes, p);
          float& value = v[held][w * Shape::kElements + p];
          value = 0.0f;
          if (at == block.count) continue;
          const uint32_t i = block.begin - share.begin + at;
          const float held_back = carry == 1.0f ? residual[i] : residual[i] * carry;
          value = is_nan(x[i]) ? quiet(x[i]) : x[i] + held_back;
          uint32_t& most = largest[p / kOfScale<kBits>][held];
          most = most < magnitude(value) ? magnitude(value) : most;
        }
    });
    for (uint32_t group = 0; group < Shape::kScaleGroups; ++group) to_largest<Shape::kLanes>(largest[group]);
    for_lanes([&](uint32_t lane, uint32_t held) {
      const uint32_t number = first + lane / Shape::kLanes, in_block = lane % Shape::kLanes;
      const typename Shape::Block block(share, number);
      if (block.count == 0) return;
      bool finite = true;
      BlockScale by[Shape::kScaleGroups];
      for (uint32_t group = 0; group < Shape::kScaleGroups; ++group) {
        finite = finite && largest[group][held] < kNotFinite;
        by[group] = block_scale<kBits>(largest[group][held]);
      }
      for (uint32_t group = 0; group < Shape::kScaleGroups; ++group)
        if (in_block == group)
          put_scale<kBits>(chunk.scales + (number * Shape::kScaleGroups + group) * kScaleBytes<kBits>,
                           finite ? float_bits(by[group].scale) : kNotFinite);
      for (uint32_t w = 0; w < Shape::kOfLane; ++w) {
        const uint32_t word_in_block = in_block + w * Shape::kLanes;
        if (word_in_block >= block.part) continue;
        uint32_t word = 0;
        for (uint32_t p = 0; p < Shape::kElements; ++p) {
          const uint32_t at = block.place(word_in_block, p), i = block.begin - share.begin + at;
          const BlockScale scale = by[p / kOfScale<kBits>];
          const float value = v[held][w * Shape::kElements + p];
          const float rounded = value * scale.inverse + kRounder;
          word |= (float_bits(rounded) & ((1U << kBits) - 1)) << (kBits * p);
          if (at < block.count) residual[i] = finite ? value - (rounded - kRounder) * scale.scale : value;
        }
        chunk.words[number * Shape::kWords + word_in_block] = word;
      }
    });
  }
}

template <uint32_t kBits>
__device__ void decode_integers(const Share& share) {
  using Shape = IntegerShare<kBits>;
  const IntegerChunk<kBits> chunk(share);
  float* const x = share.x();
  for (uint32_t first = share.begin / kIntegerBlock; first * kIntegerBlock < share.end; first += Shape::kAtOnce)
    for_lanes([&](uint32_t lane, uint32_t) {
      const uint32_t number = first + lane / Shape::kLanes;
      const typename Shape::Block block(share, number);
      for (uint32_t w = lane % Shape::kLanes; w < block.part; w += Shape::kLanes) {
        const uint32_t word = chunk.words[number * Shape::kWords + w];
        for (uint32_t p = 0; p < Shape::kElements; ++p) {
          const uint32_t at = block.place(w, p);
          if (at == block.count) continue;
          const uint32_t group = number * Shape::kScaleGroups + p / kOfScale<kBits>;
          const float scale = get_scale<kBits>(chunk.scales + group * kScaleBytes<kBits>);
          const int32_t integer = static_cast<int32_t>(word << (32 - kBits * (p + 1))) >> (32 - kBits);
          x[block.begin - share.begin + at] = static_cast<float>(integer) * scale;
        }
      }
    });
}

// Indices before this one, of n that rise.
__device__ uint32_t indices_below(const uint16_t* indices, uint32_t n, uint32_t index) {
  uint32_t first = 0, behind = n;
  while (first < behind) {
    const uint32_t middle = (first + behind) / 2;
    if (indices[middle] < index) first = middle + 1;
    else behind = middle;
  }
  return first;
}

// See codec/top_k.h. The host has verified the positions.
__device__ void decode_top_k(const Share& share, uint32_t form, bool halves) {
  const uint32_t n = form & 0xffff, count = share.chunk_elements;
  const bool as_bits = form >> 16 != 0;
  float* const x = share.x();
  for_lanes([&](uint32_t lane, uint32_t) {
    for (uint32_t i = lane; i < share.end - share.begin; i += kWarp) x[i] = 0.0f;
  });
  meet();
  if (n == 0) return;
  const uint64_t positions = share.slot() + kHeaderBytes + (halves ? sizeof(float) : 0);
  const uint32_t words = (count + 31) / 32, positions_bytes = as_bits ? words * 4 : (n + 1) / 2 * 4;
  const uint64_t values = positions + positions_bytes;
  const float unscale = halves ? *translated_to<const float>(share.slot() + kHeaderBytes, 1) : 1.0f;
  const uint16_t* const narrow = halves ? translated_to<const uint16_t>(values, n) : nullptr;
  const float* const wide = halves ? nullptr : translated_to<const float>(values, n);
  const auto value = [&](uint32_t i) { return halves ? product(half_to_float(narrow[i]), unscale) : wide[i]; };
  if (!as_bits) {
    const uint16_t* const indices = translated_to<const uint16_t>(positions, n);
    const uint32_t first = indices_below(indices, n, share.begin), behind = indices_below(indices, n, share.end);
    for_lanes([&](uint32_t lane, uint32_t) {
      for (uint32_t i = first + lane; i < behind; i += kWarp) x[indices[i] - share.begin] = value(i);
    });
    return;
  }
  // A lane has one word of the share.
  const uint32_t* const bits = translated_to<const uint32_t>(positions, words);
  const uint32_t first = share.begin / 32, behind = (share.end + 31) / 32;
  uint32_t ones[kHeld];
  for_lanes([&](uint32_t lane, uint32_t held) {
    ones[held] = 0;
    for (uint32_t word = lane; word < first; word += kWarp) ones[held] += ones_of(bits[word]);
  });
  const uint32_t before_share = to_running_sums(ones);
  for_lanes(
      [&](uint32_t lane, uint32_t held) { ones[held] = first + lane < behind ? ones_of(bits[first + lane]) : 0; });
  to_running_sums(ones);
  for_lanes([&](uint32_t lane, uint32_t held) {
    if (first + lane >= behind) return;
    uint32_t left = bits[first + lane], i = before_share + ones[held] - ones_of(left);
    for (; left != 0; left &= left - 1) x[lane * 32 + lowest_one_of(left)] = value(i++);
  });
}

}  // namespace

// The largest magnitudes of each share, where halves get a scale of each chunk's own.
extern "C" __global__ void __launch_bounds__(kBlockThreads) perseus_largest(const __grid_constant__ ChunkList list) {
  Share share;
  if (!find_share(list, &share)) return;
  const float* const x = share.x();
  uint32_t largest[kHeld], finite[kHeld];
  for_lanes([&](uint32_t lane, uint32_t held) {
    largest[held] = finite[held] = 0;
    for (uint32_t i = lane; i < share.end - share.begin; i += kWarp) {
      const uint32_t each = magnitude(x[i]);
      largest[held] = largest[held] < each ? each : largest[held];
      if (each < kNotFinite) finite[held] = finite[held] < each ? each : finite[held];
    }
  });
  to_largest<kWarp>(largest);
  to_largest<kWarp>(finite);
  uint32_t* const to = magnitudes_of(share, share.in_chunk, 1);
  for_lanes([&](uint32_t lane, uint32_t held) {
    if (lane == 0) to[0] = largest[held];
    if (lane == 1) to[1] = finite[held];
  });
}

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    perseus_encode_halves(const __grid_constant__ ChunkList list) {
  Share share;
  if (!find_share(list, &share)) return;
  const bool narrow = list.form == ChunkForm::kBFloat16;
  const float scale = scale_of(list, share);
  const uint32_t bytes = halves_bytes(share.chunk_elements), count = share.end - share.begin;
  if (share.in_chunk == 0) put_header(share, bytes, float_bits(1.0f / scale));
  uint32_t* const to = translated_to<uint32_t>(share.slot() + kHeaderBytes + share.begin * 2, (count + 1) / 2);
  const float* const x = share.x();
  const auto rounded = [&](uint32_t i) -> uint32_t {
    if (i >= count) return 0;  // what pads
    const float scaled = product(x[i], scale);
    if (!narrow) return float_to_half(scaled);
    return float_to_bfloat16(is_nan(scaled) ? float_from_bits(kNotFinite | kQuiet) : scaled);
  };
  for_lanes([&](uint32_t lane, uint32_t) {
    for (uint32_t i = 2 * lane; i < count; i += 2 * kWarp) to[i / 2] = rounded(i) | rounded(i + 1) << 16;
  });
}

extern "C" __global__ void __launch_bounds__(kBlockThreads)
    perseus_encode_integers(const __grid_constant__ ChunkList list) {
  Share share;
  if (!find_share(list, &share)) return;
  if (list.form == ChunkForm::kInt8) encode_integers<8>(share);
  else if (list.form == ChunkForm::kInt4) encode_integers<4>(share);
  else encode_integers<2>(share);
}

// Of top-k: adds x to what is held back. A slot gets the largest magnitude of each share.
extern "C" __global__ void __launch_bounds__(kBlockThreads) perseus_accumulate(const __grid_constant__ ChunkList list) {
  Share share;
  if (!find_share(list, &share)) return;
  const float* const x = share.x();
  float* const residual = share.residual();
  const float carry = share.run->carry;
  uint32_t largest[kHeld];
  for_lanes([&](uint32_t lane, uint32_t held) {
    largest[held] = 0;
    for (uint32_t i = lane; i < share.end - share.begin; i += kWarp) {
      const float held_back = carry == 1.0f ? residual[i] : residual[i] * carry;
      const float value = is_nan(x[i]) ? quiet(x[i]) : x[i] + held_back;
      residual[i] = value;
      largest[held] = largest[held] < magnitude(value) ? magnitude(value) : largest[held];
    }
  });
  to_largest<kWarp>(largest);
  uint32_t* const to = translated_to<uint32_t>(share.slot() + share.in_chunk * sizeof(uint32_t), 1);
  for_lanes([&](uint32_t lane, uint32_t held) {
    if (lane == 0) *to = largest[held];
  });
}

// Whatever form each chunk has, which the host has looked at.
extern "C" __global__ void __launch_bounds__(kBlockThreads) perseus_decode(const __grid_constant__ ChunkList list) {
  Share share;
  if (!find_share(list, &share)) return;
  const bool narrow = list.form == ChunkForm::kBFloat16, halves = narrow || list.form == ChunkForm::kFloat16;
  const uint32_t form = translated_to<const uint32_t>(share.slot(), 2)[1], count = share.end - share.begin;
  float* const x = share.x();
  if (halves) {
    const float unscale = float_from_bits(form);
    const uint32_t* const from =
        translated_to<const uint32_t>(share.slot() + kHeaderBytes + share.begin * 2, (count + 1) / 2);
    for_lanes([&](uint32_t lane, uint32_t) {
      for (uint32_t i = 2 * lane; i < count; i += 2 * kWarp) {
        const uint32_t pair = from[i / 2];
        for (uint32_t k = 0; k < 2 && i + k < count; ++k) {
          const uint16_t half = static_cast<uint16_t>(pair >> (16 * k));
          x[i + k] = product(narrow ? bfloat16_to_float(half) : half_to_float(half), unscale);
        }
      }
    });
  } else if (form == kDense) {
    const float* const from =
        translated_to<const float>(share.slot() + kHeaderBytes + share.begin * sizeof(float), count);
    for_lanes([&](uint32_t lane, uint32_t) {
      for (uint32_t i = lane; i < count; i += kWarp) x[i] = from[i];
    });
  } else if (list.form == ChunkForm::kTopK || list.form == ChunkForm::kTopKHalves) {
    decode_top_k(share, form, list.form == ChunkForm::kTopKHalves);
  } else if (list.form == ChunkForm::kInt8) {
    decode_integers<8>(share);
  } else if (list.form == ChunkForm::kInt4) {
    decode_integers<4>(share);
  } else {
    decode_integers<2>(share);
  }
}

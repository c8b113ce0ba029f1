// The bytes of a gradient's chunk between two ranks: the contract that codecs implement and compressed exchanges use.
// Implementations have no state: safe for any thread.
//
// A tensor is cut into slices and these into chunks, from its first element on, whatever bucket it travels in. Every
// chunk is encoded by itself, or by what its slice has: so results do not depend on what shares a bucket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/span.h"
#include "base/thread_pool.h"

namespace perseus {

constexpr size_t kWireChunk = 16 * 1024;  // elements; 64 KiB of floats, so passes over one stay in the cache
constexpr size_t kWireShare = 1024;       // elements of a chunk that a GPU works on together

// A chunk of a slice whose elements are selected.
struct ChunkSelection {
  const float* x;
  float* residual;  // may be null
  float* masked;    // may be null: what is sent becomes zero there
  size_t count;
  // Not null: a GPU has added x to the residual, and has left here the largest magnitude of each kWireShare elements.
  const Byte* magnitudes = nullptr;
  // What select() found: so many elements, at these places among the indices; kAll: every element.
  static constexpr size_t kAll = SIZE_MAX;
  size_t selected = 0, first = 0;
};

class WireFormat {
 public:
  virtual ~WireFormat() = default;

  // Most bytes that encode() writes for a chunk of `count` elements, 0 < count <= kWireChunk.
  virtual size_t most_bytes(size_t count) const = 0;

  // Writes the chunk x[0 … count) to `to` and returns how many bytes that took. The first four say how many, so that
  // chunks can follow each other; `to` is aligned to 4, and the size is a multiple of 4.
  // `residual`, where not null, has `count` elements: x + residual is encoded, and what decode() will not give back of
  // it is left there: decoded + residual equals x + residual before, bit for bit, as far as floats can say it. Elements
  // that are not finite pass and leave a residual of zero. (A codec that discounts what waits multiplies the residual
  // before all that; see rotating.h.) `step` counts the times this chunk was encoded, the same on all ranks.
  virtual size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const = 0;

  // All elements as they are, where nobody would keep what is lost. Of formats that keep a residual.
  virtual size_t encode_whole(const float* x, size_t count, Byte* to) const { return encode(x, nullptr, count, 0, to); }

  // The same as encode() for what an owner sends: `x` is a function of the sum of what `parts`, one of each member,
  // decode to. A format may send more of it than encode() would.
  virtual size_t encode_result(const float* x, float* residual, size_t count, uint64_t step,
                               const std::vector<const Byte*>& parts, Byte* to) const {
    return encode(x, residual, count, step, to);
  }

  // Formats that choose among all elements of a slice encode its chunks in two steps, which together do to each chunk
  // what encode() does: select() for the slice, whose chunks have one step and which appends to `indices` (of elements
  // in their chunk, rising), then encode_selected() for each chunk. `threads` may share the chunks of the first step.
  virtual bool selects() const { return false; }
  virtual void select(ChunkSelection* chunks, size_t n, uint64_t step, ThreadPool* threads,
                      std::vector<uint16_t>* indices) const {}
  virtual size_t encode_selected(const ChunkSelection& chunk, const uint16_t* indices, Byte* to) const {
    return encode(chunk.x, chunk.residual, chunk.count, 0, to);
  }

  // Of formats that GPUs know, too (cuda/chunk_kernels.cu). What one has encoded instead of encode(): writes to `to`
  // what encode() would have, and returns how many bytes that took.
  virtual size_t take_over(const Byte* encoded, float* residual, size_t count, Byte* to) const {
    uint32_t bytes;
    std::memcpy(&bytes, encoded, sizeof bytes);
    std::memcpy(to, encoded, bytes);
    return bytes;
  }
  // Before a GPU decodes it: throws Error(kIo) where decode() would.
  virtual void check(const Byte* from, size_t bytes, size_t count) const {}

  // The chunk's elements, or those added to x. `bytes` is what the chunk's first four bytes say, and lies in memory.
  // Throws Error(kIo) for bytes that no encode() of `count` elements writes.
  virtual void decode(const Byte* from, size_t bytes, size_t count, float* x) const = 0;
  virtual void decode_add(const Byte* from, size_t bytes, size_t count, float* x) const = 0;
  // decode() for an x that will not be read soon: where that is faster, its elements are stored around the cache.
  virtual void decode_streamed(const Byte* from, size_t bytes, size_t count, float* x) const {
    decode(from, bytes, count, x);
  }

  // Does what it loses matter enough to be kept and sent later (error feedback)?
  virtual bool keeps_residual() const = 0;
};

}  // namespace perseus

// Which elements of a slice are the largest. Thread-safe: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace perseus {

// A chunk of a slice: v[0 … count), count <= kWireChunk, all of it finite.
struct SelectFrom {
  const float* v;
  size_t count;
  size_t selected = 0;  // how many of its elements select_largest has taken
};

// Appends the indices in their chunk, rising, of the k largest magnitudes in all chunks, or of up to k / 4 more where
// counting found no threshold in between; of all elements that are not zero where those are fewer. Of equal ones that
// are too many, the first. 1 <= k <= number of elements; `largest` is the largest magnitude of all.
// `threads` may share the chunks.
void select_largest(SelectFrom* chunks, size_t n, size_t k, uint32_t largest, ThreadPool* threads,
                    std::vector<uint16_t>* indices);

}  // namespace perseus

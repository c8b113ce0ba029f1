// Which elements of a chunk are the largest. Thread-safe: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus {

// The indices, rising, of the k largest magnitudes among v[0 … count), or of up to k / 4 more where counting found no
// threshold in between; of all elements that are not zero where those are fewer. Of equal ones that are too many, the
// first. 1 <= k <= count <= kWireChunk, `largest` is v's largest magnitude and finite; gives their number.
size_t select_largest(const float* v, size_t count, size_t k, uint32_t largest, uint16_t* indices);

}  // namespace perseus

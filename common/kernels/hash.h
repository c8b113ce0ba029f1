// A hash of bytes at the speed of memory, for comparing what ranks hold. Pure, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus::kernels {

// XXH64 with seed 0 (Collet, "xxHash fast digest algorithm", specification 0.1.1): the same number on every processor,
// not for secrets. `data` may be null where n is 0.
uint64_t hash(const void* data, size_t n);

}  // namespace perseus::kernels

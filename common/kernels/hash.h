// A hash of bytes at the speed of memory, for comparing what ranks hold. Pure, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus::kernels {

// XXH64 with seed 0 (Collet, "xxHash fast digest algorithm", specification 0.1.1): the same number on every processor,
// not for secrets. `data` may be null where n is 0.
uint64_t hash(const void* data, size_t n);

// Two of them for every `block` bytes, of which the last may be fewer: that of the block, and that of the block without
// its first four bytes. That one divides the bytes into other words, so what fools one of them does not fool both.
void hash_blocks(const void* data, size_t n, size_t block, uint64_t* hashes);

}  // namespace perseus::kernels

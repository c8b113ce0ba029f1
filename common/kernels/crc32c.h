// The checksum of messages between hosts. Pure, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus::kernels {

// CRC32C (Castagnoli; RFC 3720, section 12.1) of what `crc` is the checksum of, 0 = nothing, and n more bytes behind
// it. Where the processor has an instruction for it, three runs of a block go at once, since each step waits for the
// one before: about 20 GB/s from the cache. `data` may be null where n is 0.
uint32_t crc32c(uint32_t crc, const void* data, size_t n);

}  // namespace perseus::kernels

// The parameter of the kernel that copies many runs of bytes inside a device at once. Read by host and device.
#pragma once

#include <cstdint>

namespace perseus::cuda {

// What a block of threads copies at most. More per thread would leave processors idle with small tensors, less costs
// more searching than copying.
constexpr uint32_t kBlockBytes = 32 * 1024;
constexpr uint32_t kBlockThreads = 256;

struct CopyRun {
  uint64_t to, from, bytes;
  uint32_t first_block;  // of the grid, that works on it
  uint32_t unused;
};

// Kernels take 4 KiB of parameters on every device.
struct CopyList {
  static constexpr uint32_t kMost = 126;
  uint32_t count;
  uint32_t unused;
  CopyRun runs[kMost];
};
static_assert(sizeof(CopyList) <= 4096, "CUDA before 12.1 takes no more");

}  // namespace perseus::cuda

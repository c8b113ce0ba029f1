// The parameter of the kernels that encode and decode chunks of gradients. Read by host and device.
#pragma once

#include <cstdint>

#include "cuda/copy_list.h"

namespace perseus::cuda {

// Elements of a chunk (kWireChunk), and the bytes from one to the next in host memory: its elements as they are, and a
// line for what may stand in front of them. The last one of a tensor takes less.
constexpr uint32_t kChunkElements = 16 * 1024;
constexpr uint32_t kSlotBytes = kChunkElements * sizeof(float) + 64;
constexpr uint32_t kDense = 0xffffffff;  // the second word of such a chunk

// What a warp works on: blocks of integers are parts of it.
constexpr uint32_t kWarp = 32;
constexpr uint32_t kShareElements = 1024;
constexpr uint32_t kSharesInChunk = kChunkElements / kShareElements;
constexpr uint32_t kSharesInBlock = kBlockThreads / kWarp;

// Whole chunks of a tensor, but for its end.
struct ChunkRun {
  uint64_t x;            // f32, on the device
  uint64_t residual;     // f32, in page-locked memory; 0 = none
  uint64_t slots;        // in page-locked memory, one for each chunk
  uint32_t count;        // elements
  uint32_t first_share;  // of all runs
  float carry;           // what the residual is multiplied by first
  uint32_t unused;
};

// kTopKHalves: of top-k, with values in 16 bits. There a device adds the gradient to what is held back, and the host
// selects of that.
enum class ChunkForm : uint32_t { kFloat16, kBFloat16, kInt8, kInt4, kInt2, kTopK, kTopKHalves };

struct ChunkList {
  static constexpr uint32_t kMost = 100;
  uint32_t count;  // runs
  ChunkForm form;
  float scale;  // of kFloat16; 0 = of each chunk's own
  uint32_t unused;
  ChunkRun runs[kMost];
};
static_assert(sizeof(ChunkList) <= 4096, "CUDA before 12.1 takes no more");

}  // namespace perseus::cuda

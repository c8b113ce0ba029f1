// Kernels for NVIDIA's GPUs. `make ptx` compiles them into kernels.ptx.inc, which is committed: whoever builds the
// library needs no CUDA, and the driver of whatever GPU compiles the rest. Tests without a GPU compile them for the
// host, where PERSEUS_TRANSLATED finds the memory that stands for the device's.
#include "cuda/copy_list.h"

#ifndef PERSEUS_TRANSLATED
#define PERSEUS_TRANSLATED(address, bytes) reinterpret_cast<void*>(address)
#endif

namespace {

using perseus::cuda::CopyList;
using perseus::cuda::CopyRun;
using perseus::cuda::kBlockBytes;
using perseus::cuda::kBlockThreads;

// Four loads are under way before the first store.
template <typename Word>
__device__ void copy_words(void* to, const void* from, uint64_t bytes) {
  constexpr uint32_t kAhead = 4;
  Word* const target = static_cast<Word*>(to);
  const Word* const source = static_cast<const Word*>(from);
  const uint32_t words = static_cast<uint32_t>(bytes / sizeof(Word));
  uint32_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kBlockThreads < words; i += kAhead * kBlockThreads) {
    Word held[kAhead];
    for (uint32_t k = 0; k < kAhead; ++k) held[k] = source[i + k * kBlockThreads];
    for (uint32_t k = 0; k < kAhead; ++k) target[i + k * kBlockThreads] = held[k];
  }
  for (; i < words; i += kBlockThreads) target[i] = source[i];
}

}  // namespace

// A block finds its run by bisection, and copies its part of it with the widest words that fit.
extern "C" __global__ void __launch_bounds__(kBlockThreads) perseus_copy(const __grid_constant__ CopyList list) {
  if (list.count == 0) return;
  uint32_t first = 0, behind = list.count;
  while (behind - first > 1) {
    const uint32_t middle = (first + behind) / 2;
    if (list.runs[middle].first_block <= blockIdx.x) first = middle;
    else behind = middle;
  }
  const CopyRun& run = list.runs[first];
  const uint64_t begin = static_cast<uint64_t>(blockIdx.x - run.first_block) * kBlockBytes;
  const uint64_t bytes = run.bytes - begin < kBlockBytes ? run.bytes - begin : kBlockBytes;
  char* const to = static_cast<char*>(PERSEUS_TRANSLATED(run.to + begin, bytes));
  const char* const from = static_cast<const char*>(PERSEUS_TRANSLATED(run.from + begin, bytes));
  const uint64_t both = run.to | run.from;  // blocks begin at multiples of words
  uint64_t done = 0;
  if (both % sizeof(uint4) == 0) {
    copy_words<uint4>(to, from, bytes);
    done = bytes / sizeof(uint4) * sizeof(uint4);
  } else if (both % sizeof(uint32_t) == 0) {
    copy_words<uint32_t>(to, from, bytes);
    done = bytes / sizeof(uint32_t) * sizeof(uint32_t);
  }
  copy_words<char>(to + done, from + done, bytes - done);
}

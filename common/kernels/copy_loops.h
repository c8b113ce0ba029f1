// Copies in both flavours: into the cache, and around it. Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/lanes.h"
#include "kernels/page_walk.h"

namespace perseus::kernels {
namespace {

template <bool kStream>
PERSEUS_INLINE void copy_group(unsigned char* dst, const unsigned char* src) {
  using Bytes = Vector<uint8_t>;
  constexpr size_t kVectors = kGroupBytes / sizeof(Bytes);
  Bytes group[kVectors];
  for (size_t v = 0; v < kVectors; ++v) group[v] = load_vector<Bytes>(src + v * sizeof(Bytes));
  for (size_t v = 0; v < kVectors; ++v) {
    if constexpr (kStream) {
      stream_vector(dst + v * sizeof(Bytes), group[v]);
    } else {
      store_vector(dst + v * sizeof(Bytes), group[v]);
    }
  }
}

template <bool kStream>
void copy_long(unsigned char* dst, const unsigned char* src, size_t n) {
  constexpr size_t kLineBytes = 64;
  size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(dst) % kLineBytes) % kLineBytes;
  __builtin_memcpy(dst, src, head);
  unsigned char* to = dst + head;
  const unsigned char* from = src + head;
  size_t done = walk_pages<kGroupBytes>(
      n - head, [=](size_t at) __attribute__((always_inline)) { copy_group<kStream>(to + at, from + at); });
  if (kStream) stream_fence();
  __builtin_memcpy(to + done, from + done, n - head - done);
}

void copy_any(void* dst, const void* src, size_t n, bool stream) {
  constexpr size_t kLongMin = 8192;  // below, memcpy is as good and the fence costs more than streaming brings
  auto* to = static_cast<unsigned char*>(dst);
  auto* from = static_cast<const unsigned char*>(src);
  if (n < kLongMin) {
    __builtin_memcpy(to, from, n);
  } else if (stream) {
    copy_long<true>(to, from, n);
  } else {
    copy_long<false>(to, from, n);
  }
}

}  // namespace
}  // namespace perseus::kernels

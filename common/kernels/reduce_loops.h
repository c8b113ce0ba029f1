// The loops of reduce for one element type and one reduction. Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/page_walk.h"
#include "kernels/reduce_types.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {

constexpr size_t kLine = 64;

template <class Type, class Op>
class Reduction {
 public:
  Reduction(const ReduceTask& task, const Factors& factors) : task_(task), factors_(factors) {}

  void run() const {
    size_t to_boundary = (kLine - reinterpret_cast<uintptr_t>(task_.dst) % kLine) % kLine;
    bool can_align = to_boundary % Type::kSize == 0;
    size_t head = can_align ? to_boundary / Type::kSize : 0;
    if (task_.count * Type::kSize < kAlignMin) head = 0;
    bool stream = task_.stream_dst && can_align && !in_place() && task_.count * Type::kSize >= kAlignMin;
    if (head != 0) rest(0, head);
    if (task_.n == 2) {
      range<2>(head, stream);
    } else {
      range<0>(head, stream);
    }
    if (stream) stream_fence();
  }

 private:
  using Acc = typename Type::Acc;
  using Stored = typename Type::Stored;
  static constexpr size_t kLanes = Type::kLanes;
  static constexpr size_t kAlignMin = 1024;  // bytes below which alignment and fences cost more than they bring
  // Vectors whose accumulators stay in registers over all sources.
  static constexpr size_t kGroup = kGroupBytes / sizeof(Stored) < 8 ? kGroupBytes / sizeof(Stored) : 8;

  // Lines that were just read sit in the cache: storing around it would throw them out first.
  bool in_place() const {
    for (int k = 0; k < task_.n; ++k) {
      if (task_.sources[k] == task_.dst) return true;
    }
    return false;
  }

  PERSEUS_INLINE Acc load(int k, size_t at) const { return Type::load(task_.sources[k] + at, factors_); }

  // kVectors vectors at byte `at` of kSources sources, 0 = as many as the task says.
  template <int kSources, size_t kVectors>
  PERSEUS_INLINE void group(size_t at, bool stream) const {
    const int n = kSources != 0 ? kSources : task_.n;
    Acc acc[kVectors];
    for (size_t v = 0; v < kVectors; ++v) acc[v] = load(0, at + v * sizeof(Stored));
    for (int k = 1; k < n; ++k) {
      for (size_t v = 0; v < kVectors; ++v) acc[v] = Op::combine(acc[v], load(k, at + v * sizeof(Stored)));
    }
    for (size_t v = 0; v < kVectors; ++v, at += sizeof(Stored)) {
      Stored stored = Type::finish(acc[v], factors_);
      if (stream) {
        stream_vector(task_.dst + at, stored);
      } else {
        store_vector(task_.dst + at, stored);
      }
      if (task_.dst2 != nullptr) store_vector(task_.dst2 + at, stored);
    }
  }

  // Everything from element `begin` on.
  template <int kSources>
  void range(size_t begin, bool stream) const {
    size_t start = begin * Type::kSize, end = task_.count * Type::kSize;
    size_t at =
        start + walk_pages<kGroup * sizeof(Stored)>(end - start, [=](size_t offset) __attribute__((always_inline)) {
          group<kSources, kGroup>(start + offset, stream);
        });
    for (; end - at >= sizeof(Stored); at += sizeof(Stored)) group<kSources, 1>(at, stream);
    if (at < end) rest(at / Type::kSize, (end - at) / Type::kSize);
  }

  // A few elements without reading or writing beyond them, through vectors filled up with zeros.
  __attribute__((noinline)) void rest(size_t begin, size_t count) const {
    for (size_t done = 0; done < count; done += kLanes) {
      size_t now = count - done < kLanes ? count - done : kLanes;
      partial((begin + done) * Type::kSize, now * Type::kSize);
    }
  }

  PERSEUS_INLINE void partial(size_t at, size_t bytes) const {
    unsigned char buffer[sizeof(Stored)] = {};
    __builtin_memcpy(buffer, task_.sources[0] + at, bytes);
    Acc acc = Type::load(buffer, factors_);
    for (int k = 1; k < task_.n; ++k) {
      __builtin_memcpy(buffer, task_.sources[k] + at, bytes);
      acc = Op::combine(acc, Type::load(buffer, factors_));
    }
    store_vector(buffer, Type::finish(acc, factors_));
    __builtin_memcpy(task_.dst + at, buffer, bytes);
    if (task_.dst2 != nullptr) __builtin_memcpy(task_.dst2 + at, buffer, bytes);
  }

  const ReduceTask task_;
  const Factors factors_;
};

}  // namespace
}  // namespace perseus::kernels

// The order in which long arrays are gone through: a little of each of four pages in turn. Internal linkage, see
// variant.h; no threads.
//
// A core fetches ahead within a page only, so one page at a time leaves it waiting at every page's start; with four it
// always has something to fetch. Against one page at a time this nearly doubles what a core reads from main memory
// while others do the same, and what it streams there from elsewhere in main memory.
#pragma once

#include "kernels/lanes.h"

namespace perseus::kernels {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kPagesAtOnce = 4;
// Visited at a time. Smaller bits of four pages, streamed in turn, are more lines under way than a core combines writes
// for: half the speed of 256 bytes.
constexpr size_t kGroupBytes = 256;

// Calls visit(offset) once for every whole group of kGroup bytes in [0, bytes); gives the number of bytes visited.
template <size_t kGroup, class Visit>
PERSEUS_INLINE size_t walk_pages(size_t bytes, const Visit& visit) {
  static_assert(kPageBytes % kGroup == 0, "groups fill a page");
  size_t at = 0;
  for (; bytes - at >= kPagesAtOnce * kPageBytes; at += kPagesAtOnce * kPageBytes) {
    for (size_t in_page = 0; in_page < kPageBytes; in_page += kGroup) {
#pragma GCC unroll 1  // nothing to gain, and four times the code
      for (size_t page = 0; page < kPagesAtOnce; ++page) visit(at + page * kPageBytes + in_page);
    }
  }
  for (; bytes - at >= kGroup; at += kGroup) visit(at);
  return at;
}

}  // namespace
}  // namespace perseus::kernels

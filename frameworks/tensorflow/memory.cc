// TensorFlow allocates every result of a step anew, and glibc gives large blocks back to the system as they are freed:
// each step then begins with a page fault, ~4 µs, for every 4 KiB of it. With gradients of 14 MB that was as much time
// as their exchange takes.
#include "memory.h"

#include <malloc.h>

namespace perseus::tensorflow {
namespace {

// The most that glibc takes; blocks beyond it are mapped and unmapped one by one.
constexpr int kMapFrom = 32 * 1024 * 1024;
// Of free memory at the end of the heap, so that a process that has become smaller does give memory back.
constexpr int kKeep = 1024 * 1024 * 1024;

}  // namespace

void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, kMapFrom);
  mallopt(M_TRIM_THRESHOLD, kKeep);
}

}  // namespace perseus::tensorflow

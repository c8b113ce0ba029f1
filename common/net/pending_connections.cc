// RLIMIT_NOFILE, which may change while a listener serves.
#include "net/pending_connections.h"

#include <sys/resource.h>

namespace perseus {

size_t descriptors_for_pending(size_t share, size_t least, size_t most) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return least;
  return std::clamp<rlim_t>(files.rlim_cur / share, least, most);
}

}  // namespace perseus

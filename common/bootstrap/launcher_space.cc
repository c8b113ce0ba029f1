// What the ways to talk to a launcher have in common: patience.
#include "bootstrap/launcher_space.h"

#include "base/clock.h"
#include "base/error.h"

namespace perseus {

void check_patience(const SpaceOptions& options, const std::string& what) {
  if (now_ns() < options.deadline_ns) return;
  fail(ErrorKind::kTimeout, "[rendezvous] " + what + " did not arrive within " + std::to_string(options.limit_s) +
                                " s (HOROVOD_START_TIMEOUT): look at what the ranks printed last");
}

}  // namespace perseus

// What a fork must not inherit: in the child every guarded descriptor is closed (a DataLoader worker would otherwise
// keep a dead parent's connections open) and fork_generation() differs, so contexts know they are dead. Thread-safe.
#pragma once

#include <cstdint>

namespace perseus {

// Closes the descriptor when there is no memory to remember it.
void guard_fd(int fd);
// Ends that and closes; does nothing for fd < 0 or in a forked child, where it is closed already.
void close_guarded(int fd);

// 0 in the process that loaded the library, one more in each generation of children.
uint32_t fork_generation();

}  // namespace perseus

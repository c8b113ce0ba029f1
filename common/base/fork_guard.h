// What a fork must not inherit: in the child every guarded descriptor is closed (a DataLoader worker would otherwise
// keep a dead parent's connections open) and fork_generation() differs, so contexts know they are dead. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace perseus {

// Calls `open` and guards the descriptor that it returns, with no fork in between; returns it. A negative one is an
// error: errno is as `open` left it. Throws std::bad_alloc before it opens anything.
int open_guarded(const std::function<int()>& open);
// The same for a call that opens up to `most` at once: while one of these exists, a fork waits.
class ForksWait {
 public:
  explicit ForksWait(size_t most);
  ~ForksWait();
  ForksWait(const ForksWait&) = delete;
  ForksWait& operator=(const ForksWait&) = delete;
  void guard(int fd);
};
// Ends that and closes; does nothing for fd < 0 or in a forked child, where it is closed already.
void close_guarded(int fd);

// 0 in the process that loaded the library, one more in each generation of children.
uint32_t fork_generation();

}  // namespace perseus

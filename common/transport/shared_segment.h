// A piece of shared memory without a name: memfd, reserved at once, passed by descriptor, never inherited by a fork.
// The memory needs its descriptor only until the peer has it. Owned by one object; not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "net/socket.h"

namespace perseus {

class SharedSegment {
 public:
  SharedSegment() = default;
  // Makes `bytes` of zeros. Throws Error(kIo) that names the need and the remedy when the memory is not to be had.
  explicit SharedSegment(size_t bytes);
  // Maps what a peer passed; closes its descriptor. Throws Error(kIo) when it is smaller than `bytes`.
  SharedSegment(Socket memory, size_t bytes);
  SharedSegment(SharedSegment&& other) noexcept { *this = static_cast<SharedSegment&&>(other); }
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  void* data() const { return data_; }
  size_t size() const { return size_; }
  // -1 once it is closed.
  int fd() const { return memory_.fd(); }
  void close_fd() { memory_.reset(); }

 private:
  void map();

  Socket memory_;
  uint32_t process_ = 0;  // fork_generation() of the one that mapped it
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace perseus

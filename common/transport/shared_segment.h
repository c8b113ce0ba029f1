// A piece of shared memory without a name: memfd, reserved at once, passed by descriptor, never inherited by a fork.
// The memory needs its descriptor only until the peer has it. Owned by one object; not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus {

class SharedSegment {
 public:
  SharedSegment() = default;
  // Makes `bytes` of zeros. Throws Error(kIo) that names the need and the remedy when the memory is not to be had.
  explicit SharedSegment(size_t bytes);
  // Maps what a peer passed; takes over the descriptor and closes it. Throws Error(kIo) when it is smaller than
  // `bytes`.
  SharedSegment(int fd, size_t bytes);
  SharedSegment(SharedSegment&& other) noexcept { *this = static_cast<SharedSegment&&>(other); }
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  void* data() const { return data_; }
  size_t size() const { return size_; }
  // -1 once it is closed.
  int fd() const { return fd_; }
  void close_fd();

 private:
  void map();

  int fd_ = -1;
  uint32_t process_ = 0;  // fork_generation() of the one that mapped it
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace perseus

// memfd_create, fallocate (so that missing memory is an error now, not a SIGBUS later), mmap.
#include "transport/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fork_guard.h"

namespace perseus {

SharedSegment::SharedSegment(size_t bytes) : size_(bytes) {
  fd_ = memfd_create("perseus", MFD_CLOEXEC);
  int error = fd_ < 0 ? errno : 0;
  if (error == 0) error = ftruncate(fd_, static_cast<off_t>(bytes)) != 0 ? errno : 0;
  if (error == 0) error = posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
  if (error != 0) {
    if (fd_ >= 0) ::close(fd_);
    fail(ErrorKind::kIo, "[shm] cannot reserve " + std::to_string(bytes / 1024) + " KiB of shared memory (" +
                             std::strerror(error) +
                             "): raise the container's or job's memory limit, or set PERSEUS_TRANSPORT=tcp");
  }
  guard_fd(fd_);
  map();
}

SharedSegment::SharedSegment(int fd, size_t bytes) : fd_(fd), size_(bytes) {
  guard_fd(fd_);
  struct stat info{};
  if (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) < bytes) {
    close_guarded(fd_);
    fail(ErrorKind::kIo, "[shm] a peer passed a segment of " + std::to_string(info.st_size) + " bytes, expected " +
                             std::to_string(bytes));
  }
  map();
}

void SharedSegment::map() {
  void* at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    close_guarded(fd_);
    fail(ErrorKind::kIo, std::string("[shm] cannot map shared memory: ") + std::strerror(error));
  }
  data_ = at;
  madvise(data_, size_, MADV_DONTFORK);
}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedSegment::~SharedSegment() {
  if (fd_ < 0) return;
  // In a forked child the mapping is not there (MADV_DONTFORK) and the range may belong to somebody else.
  const bool ours = fcntl(fd_, F_GETFD) >= 0;
  if (ours && data_ != nullptr) munmap(data_, size_);
  close_guarded(fd_);
}

}  // namespace perseus

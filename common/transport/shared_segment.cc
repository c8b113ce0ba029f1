// memfd_create, fallocate (so that missing memory is an error now, not a SIGBUS later), mmap.
#include "transport/shared_segment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/blocked_signals.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/fork_guard.h"

namespace perseus {
namespace {

// Returns an error number.
int set_size(int fd, off_t bytes) {
  int error;
  do error = ftruncate(fd, bytes) != 0 ? errno : 0;
  while (error == EINTR);
  if (error != 0) return error;
  do error = posix_fallocate(fd, 0, bytes);
  while (error == EINTR);
  return error;
}

// Returns an error number. A reservation that a signal interrupts begins again, which a profiler's timer could do for
// ever.
int reserve(int fd, off_t bytes) {
  const BlockedSignals blocked;
  sigset_t pending, too_large;
  sigpending(&pending);
  sigemptyset(&too_large);
  sigaddset(&too_large, SIGXFSZ);
  const int error = set_size(fd, bytes);
  // The kernel's signal says the same, and would end a program that can do without this memory.
  const timespec at_once{};
  if (error == EFBIG && sigismember(&pending, SIGXFSZ) == 0) sigtimedwait(&too_large, nullptr, &at_once);
  return error;
}

}  // namespace

SharedSegment::SharedSegment(size_t bytes) : size_(bytes) {
  memory_ = Socket([] { return memfd_create("perseus", MFD_CLOEXEC); });
  int error = memory_ ? 0 : errno;
  if (error == 0) error = reserve(fd(), static_cast<off_t>(bytes));
  if (error != 0) {
    const std::string what = "[shm] cannot reserve " + std::to_string(bytes / 1024) + " KiB of shared memory";
    if (error == EMFILE || error == ENFILE) fail(ErrorKind::kIo, what + ": " + error_text(error));
    const char* limit = error == EFBIG ? "limit on file sizes (ulimit -f)" : "container's or job's memory limit";
    fail(ErrorKind::kIo, what + " (" + error_text(error) + "): raise the " + limit + ", or set PERSEUS_TRANSPORT=tcp");
  }
  map();
}

SharedSegment::SharedSegment(Socket memory, size_t bytes) : memory_(std::move(memory)), size_(bytes) {
  struct stat info{};
  if (fstat(fd(), &info) != 0 || static_cast<size_t>(info.st_size) < bytes)
    fail(ErrorKind::kIo, "[shm] a peer passed a segment of " + std::to_string(info.st_size) + " bytes, expected " +
                             std::to_string(bytes));
  map();
  close_fd();
}

void SharedSegment::map() {
  void* at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd(), 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    fail(ErrorKind::kIo, "[shm] cannot map " + std::to_string(size_ / 1024) + " KiB of shared memory (" +
                             error_text(error) + "): raise the limit of this process's address space (ulimit -v), or " +
                             "set PERSEUS_TRANSPORT=tcp");
  }
  data_ = at;
  process_ = fork_generation();
  madvise(data_, size_, MADV_DONTFORK);
}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(memory_, other.memory_);
  std::swap(process_, other.process_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedSegment::~SharedSegment() {
  // In a forked child the mapping is not there (MADV_DONTFORK) and the range may belong to somebody else.
  if (data_ != nullptr && process_ == fork_generation()) munmap(data_, size_);
}

}  // namespace perseus

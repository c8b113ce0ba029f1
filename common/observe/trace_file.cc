// Opening and appending.
#include "observe/trace_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/fork_guard.h"

namespace perseus {
namespace {

constexpr int kMostNames = 1000;
constexpr char kOpening[] = "[\n", kSeparator[] = ",\n", kClosing[] = "\n]\n";

}  // namespace

std::string before_suffix(const std::string& path, const std::string& more) {
  const size_t name = path.rfind('/') == std::string::npos ? 0 : path.rfind('/') + 1;
  const size_t dot = path.rfind('.');
  // The dot of a hidden file's name begins no suffix.
  const size_t end = dot == std::string::npos || dot <= name ? path.size() : dot;
  return path.substr(0, end) + more + path.substr(end);
}

TraceFile::TraceFile(const std::string& path) : wanted_(path) {
  // Opening may wait for a server, which must not hold up a fork: a file is guarded a moment later.
  const int opened = open_free();
  if (opened >= 0) {
    // Events take the place of the closing bracket, which a pipe cannot do.
    if (::lseek(opened, 0, SEEK_CUR) == 0) fd_ = open_guarded([&] { return ::fcntl(opened, F_DUPFD_CLOEXEC, 0); });
    const int why = errno;
    ::close(opened);
    errno = why;
  }
  if (fd_ < 0)
    fail(ErrorKind::kInvalidArgument, "[timeline] cannot write '" + path + "': " + error_text(errno) +
                                          ". Name a file in a directory that exists and may be written to");
}

// As long as the file is open, it is locked. Where there are no locks, or for devices, nothing is. O_NONBLOCK: a pipe
// that nobody reads is refused at once.
int TraceFile::open_free() {
  for (int number = 1;; ++number) {
    path_ = number == 1 ? wanted_ : before_suffix(wanted_, "-" + std::to_string(number));
    const int opened = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    struct stat status{};
    if (opened < 0 || ::fstat(opened, &status) != 0 || !S_ISREG(status.st_mode)) return opened;
    const bool taken = ::flock(opened, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (!taken && ::ftruncate(opened, 0) == 0) return opened;
    const int why = errno;
    ::close(opened);
    errno = why;
    if (!taken || number == kMostNames) return -1;
  }
}

TraceFile::~TraceFile() { close_guarded(fd_); }

std::string TraceFile::append(const std::string& events) {
  if (events.empty()) return "";
  const std::string head = (end_ == 0 ? kOpening : kSeparator) + events;
  std::string trouble = write_at(head + kClosing);
  if (trouble.empty()) {
    end_ += static_cast<int64_t>(head.size());
  } else if (::ftruncate(fd_, end_) == 0 && end_ > 0) {
    // What there was is still a whole array, if only the bracket finds room.
    write_at(kClosing);
  }
  return trouble;
}

std::string TraceFile::write_at(const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::pwrite(fd_, text.data() + done, text.size() - done, end_ + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? std::strerror(errno) : "nothing was written";
    done += static_cast<size_t>(n);
  }
  return "";
}

}  // namespace perseus

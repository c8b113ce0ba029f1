// One write(2) per line, so that lines of several ranks on one terminal do not mix.
#include "base/log.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "base/write_aside.h"

namespace perseus {

void Log::write(LogLevel level, const std::string& text) const {
  if (!enabled(level)) return;
  constexpr const char* kNames[] = {"trace", "debug", "info", "warning", "error", "fatal"};
  std::string line;
  if (!hide_time_) {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    tm local;
    localtime_r(&now.tv_sec, &local);
    char stamp[48];
    const size_t n = strftime(stamp, sizeof stamp, "%Y-%m-%d %H:%M:%S", &local);
    snprintf(stamp + n, sizeof stamp - n, ".%03d ", static_cast<int>(now.tv_nsec / 1'000'000));
    line += stamp;
  }
  line += "perseus";
  if (rank_ >= 0) line += " rank " + std::to_string(rank_);
  line += std::string(" ") + kNames[static_cast<int>(level)] + ": " + text + "\n";
  write_aside([line] {
    size_t done = 0;
    while (done < line.size()) {
      const ssize_t n = ::write(STDERR_FILENO, line.data() + done, line.size() - done);
      if (n > 0) {
        done += static_cast<size_t>(n);
      } else if (n < 0 && errno == EAGAIN) {
        // Another process, with which this one shares standard error, may have made it non-blocking.
        pollfd ready{STDERR_FILENO, POLLOUT, 0};
        ::poll(&ready, 1, -1);
      } else if (errno != EINTR) {
        return;  // nothing sensible can be done when standard error is gone
      }
    }
  });
}

}  // namespace perseus

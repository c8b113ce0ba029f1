// One write(2) per line, so that lines of several ranks on one terminal do not mix.
#include "base/log.h"

#include <time.h>
#include <unistd.h>

#include <cstdio>

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
  // Nothing sensible can be done when standard error is gone.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace perseus

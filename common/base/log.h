// Lines on standard error, one write each, with a level and the rank they speak for. A line is out when the call
// returns, unless nobody reads standard error: then it follows as soon as somebody does. Thread-safe.
#pragma once

#include <string>

#include "base/choices.h"

namespace perseus {

// Where a Context's lines go; cheap to copy.
class Log {
 public:
  Log() = default;
  Log(LogLevel least, bool hide_time, int rank) : least_(least), hide_time_(hide_time), rank_(rank) {}

  bool enabled(LogLevel level) const { return level >= least_; }
  void write(LogLevel level, const std::string& text) const;
  void warning(const std::string& text) const { write(LogLevel::kWarning, text); }
  void debug(const std::string& text) const {
    if (enabled(LogLevel::kDebug)) write(LogLevel::kDebug, text);
  }

 private:
  LogLevel least_ = LogLevel::kWarning;
  bool hide_time_ = false;
  int rank_ = -1;
};

}  // namespace perseus

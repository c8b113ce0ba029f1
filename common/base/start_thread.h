// Starts the threads that Perseus cannot do without. Thread-safe.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/blocked_signals.h"
#include "base/error.h"

namespace perseus {

// The thread gets no signals. Throws Error(kIo), which begins with `component`, where the system lets this user or
// container have no more threads.
template <class Body>
std::thread start_thread(const char* component, Body body) {
  const BlockedSignals blocked;
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    fail(ErrorKind::kIo, std::string("[") + component + "] cannot start a thread (" + error.code().message() +
                             "): raise `ulimit -u` or the container's pids limit");
  }
}

}  // namespace perseus

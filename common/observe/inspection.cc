#include "observe/inspection.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "base/error.h"
#include "base/mutex.h"

namespace perseus {
namespace {

using Handler = void (*)(int);

std::atomic<uint64_t> asked{0};
std::atomic<int> answered{0};
std::atomic<Handler> before{nullptr};
Mutex& mutex() {
  static Mutex& made = *new Mutex;  // contexts may outlive main()
  return made;
}

void on_signal(int number) {
  if (const Handler handler = before.load(); handler != nullptr) handler(number);
  asked.fetch_add(1, std::memory_order_relaxed);
}

Handler handler_of(int number) {
  struct sigaction now{};
  return ::sigaction(number, nullptr, &now) == 0 ? now.sa_handler : SIG_IGN;
}

bool handle(int number) {
  struct sigaction ours{};
  ours.sa_handler = on_signal;
  ours.sa_flags = SA_RESTART;
  return ::sigaction(number, &ours, nullptr) == 0;
}

}  // namespace

void answer_inspections(int number) {
  if (number != 0 && number != SIGUSR1 && number != SIGUSR2 && number < SIGRTMIN)
    fail(ErrorKind::kInvalidArgument, "[config] PERSEUS_INSPECT_SIGNAL=" + std::to_string(number) +
                                          ": expected 0, 10, 12, or " + std::to_string(SIGRTMIN) + " to " +
                                          std::to_string(SIGRTMAX) + ", since others have a meaning");
  const MutexLock lock(mutex());
  if (number == 0 || answered.load() != 0 || handler_of(number) != SIG_DFL) return;
  if (handle(number)) answered.store(number);
}

int answered_signal() { return answered.load(); }

void call_before_answering() {
  const MutexLock lock(mutex());
  const int number = answered.load();
  const Handler theirs = number == 0 ? SIG_IGN : handler_of(number);
  if (theirs == on_signal || theirs == SIG_DFL || theirs == SIG_IGN) return;
  before.store(theirs);
  handle(number);
}

uint64_t inspections() { return asked.load(std::memory_order_relaxed); }

void inspect_this_process() {
  const int number = answered.load();
  if (number != 0 && handler_of(number) == on_signal) ::kill(::getpid(), number);
}

}  // namespace perseus

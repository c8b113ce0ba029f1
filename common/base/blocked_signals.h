// Signals belong to the program's own threads: while one of these lives, its thread blocks all of them, and so does for
// ever what it starts meanwhile. Belongs to one thread.
#pragma once

#include <signal.h>

namespace perseus {

class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace perseus

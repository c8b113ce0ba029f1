// Work that takes several collectives, one after the other, among all members of a group or some of them.
#pragma once

#include "base/progress_lock.h"
#include "collective/exchange_plan.h"
#include "topology/levels.h"

namespace perseus {

class Staged : public OutputSink {
 public:
  struct Step {
    const ExchangePlan* plan = nullptr;
    Level level = Level::kAll;
    bool sizes_vary = false;  // members announce what they send: allocate() is told
  };

  // False while a GPU computes what the first next() needs. Whoever asks begins that, and asks again.
  virtual bool ready() PERSEUS_REQUIRES(progress_lock) { return true; }
  // Before the first collective and after each: computes with what has come, and says which is the next one to run.
  // False when all outputs are written.
  virtual bool next(Step* step) PERSEUS_REQUIRES(progress_lock) = 0;
  // Time spent on encoding and decoding so far, of this operation.
  virtual int64_t codec_ns() const PERSEUS_REQUIRES(progress_lock) { return 0; }
};

}  // namespace perseus

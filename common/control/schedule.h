// The order in which a group's allreduces become ready, step after step: learnt from what rounds made ready and, when
// it has repeated itself often enough, frozen, so that nothing needs to be said any more. A replica: all ranks of the
// group apply the same rounds, so all learn the same and freeze it after the same round.
#pragma once

#include <cstdint>
#include <vector>

#include "base/progress_lock.h"
#include "request/batch.h"
#include "request/request.h"

namespace perseus {

class Schedule {
 public:
  // What became ready in one round, in the order of execution. May freeze.
  void learn(const std::vector<Entry*>& ready) PERSEUS_REQUIRES(progress_lock);
  // What became ready in one round beside the frozen order. Returns whether it has been so much that another order
  // should be learnt: gradients that began later, but not metrics. The same on all ranks.
  bool outgrown(const std::vector<Entry*>& ready) PERSEUS_REQUIRES(progress_lock);
  // What was learnt no longer holds.
  void forget() PERSEUS_REQUIRES(progress_lock);

  bool frozen() const PERSEUS_REQUIRES(progress_lock) { return !batches_.empty(); }
  // Of names, requests and batches; never 0.
  uint64_t fingerprint() const PERSEUS_REQUIRES(progress_lock) { return fingerprint_; }
  // Names in the order of execution; the batches come round for ever.
  const std::vector<std::vector<Name*>>& batches() const PERSEUS_REQUIRES(progress_lock) { return batches_; }
  // Ends after so many batches. A schedule that broke soon is not tried again so soon.
  void thaw(uint64_t batches) PERSEUS_REQUIRES(progress_lock);

 private:
  void see(Name* name) PERSEUS_REQUIRES(progress_lock);
  void end_step(bool complete) PERSEUS_REQUIRES(progress_lock);
  bool steady() const PERSEUS_REQUIRES(progress_lock);
  void freeze() PERSEUS_REQUIRES(progress_lock);

  struct Seen {
    Name* name;
    uint64_t round;
  };
  std::vector<Seen> seen_, last_;  // in this step so far; in the one before
  std::vector<Name*> expected_;    // what makes a step complete
  size_t expected_seen_ = 0;
  std::vector<Name*> extra_;  // seen in this step and the one before, but not expected
  uint64_t step_ = 1, round_ = 0;
  int same_ = 0;            // complete steps in a row
  int needed_ = 0;          // that freeze the order; 0 = not yet broken
  int needed_before_ = 0;   // the last schedule broke
  uint64_t thawed_in_ = 0;  // the step

  std::vector<std::vector<Name*>> batches_;
  uint64_t fingerprint_ = 0, frozen_ = 0;

  // Steps beside the frozen order, which end where a name is seen again. Every `patience_` of them are judged. Whenever
  // they have ended an order it doubles, so that jobs whose phases take turns do not relearn for ever.
  int beside_ = 0, patience_ = 3;
  size_t beside_bytes_ = 0, pass_bytes_ = 0;
  bool outgrown_ = false;
};

}  // namespace perseus

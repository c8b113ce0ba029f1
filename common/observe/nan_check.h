// The search for NaN in gradients (PERSEUS_ALLREDUCE_NANCHECK): each rank looks at what it submits, the verdict travels
// with the announcement that the gradient is ready, so all ranks know it before the gradient is reduced. A sum that has
// become NaN (Inf and -Inf, or one written into a gradient on its way) is seen in the result, whose bits are the same
// on all ranks, or on those of a host where only these are summed. Thread-safe.
#pragma once

#include <vector>

#include "base/log.h"
#include "request/handle_table.h"
#include "request/request.h"

namespace perseus {

class NanCheck {
 public:
  NanCheck(bool on, NanAction action) : on_(on), action_(action) {}

  bool on() const { return on_; }

  // Records the tensors with a NaN in the description of a gradient that is about to be submitted.
  void scan(Entry* entry) const;
  // Records sums with a NaN if no rank had one.
  void scan_sums(const std::vector<Entry*>& finished) const;
  // Writes one warning about all finished gradients with a NaN, unless they end with an error that says so.
  void report(const std::vector<Entry*>& finished, const Log& log) const;
  // Sets the status or the outcome that the caller gets for a reduced gradient. A host that alone knows of the NaN must
  // not skip a step that others take, so the gradient becomes zeros there. Returns whether it has.
  bool judge(const Entry& entry, HandleTable::Slot* slot) const;

 private:
  const bool on_;
  const NanAction action_;
};

}  // namespace perseus

// The Group whose members exchange messages over links, each with every other: the pairwise exchange does every
// collective, lists of steps do allreduces by other algorithms.
#pragma once

#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/exchange.h"
#include "collective/stepped_exchange.h"

namespace perseus {

class LinkGroup final : public Group {
 public:
  // `links[i]` reaches member i; links[me] is null. They are used by nobody else and outlive the group.
  LinkGroup(std::vector<Link*> links, int me, uint32_t epoch, Channel channel);

  bool serves(const Work& work) const override PERSEUS_REQUIRES(progress_lock) {
    return work.staged == nullptr && work.device == Device();
  }
  // A list of steps writes to its buffers before all members have sent their headers.
  bool rolls_back(const Work& work) const override PERSEUS_REQUIRES(progress_lock) { return !in_steps(*work.plan); }
  Operation& plan(const Work& work) override PERSEUS_REQUIRES(progress_lock);

 private:
  bool in_steps(const ExchangePlan& plan) const { return plan.algorithm != Algorithm::kPairwise && links_.size() > 1; }

  const std::vector<Link*> links_;
  const int me_;
  ExchangeHeader header_ PERSEUS_GUARDED_BY(progress_lock);  // of the next operation
  Exchange exchange_ PERSEUS_GUARDED_BY(progress_lock);
  std::unique_ptr<SteppedExchange> stepped_ PERSEUS_GUARDED_BY(progress_lock);  // made when first needed
};

}  // namespace perseus

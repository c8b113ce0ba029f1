// Chooses which exchange carries out a plan, and numbers the exchanges.
#include "collective/link_group.h"

namespace perseus {

LinkGroup::LinkGroup(std::vector<Link*> links, int me, uint32_t epoch, Channel channel)
    : links_(std::move(links)), me_(me), exchange_(links_, me) {
  header_.epoch = epoch;
  header_.group = channel.group;
  header_.stream = channel.stream;
}

Operation& LinkGroup::plan(const Work& work) {
  describe(*work.plan, &header_);
  header_.schedule = work.schedule;
  Operation* operation = &exchange_;
  if (in_steps(*work.plan)) {
    if (!stepped_) stepped_ = std::make_unique<SteppedExchange>(links_, me_);
    stepped_->start(*work.plan, header_);
    operation = stepped_.get();
  } else {
    exchange_.start(*work.plan, header_, work.sink);
  }
  ++header_.sequence;
  return *operation;
}

}  // namespace perseus

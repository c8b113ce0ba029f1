// Recursive doubling (Thakur et al. 2005): in round i a member exchanges the whole range with the one at distance 2^i,
// and both reduce it.
#include "collective/participants.h"

namespace perseus {

void recursive_doubling_steps(size_t bytes, int members, int me, std::vector<Step>* steps) {
  steps->clear();
  const Participants all(members, me);
  hand_in(all, bytes, steps);
  for (int round = 0; all.takes_part() && 1 << round < all.count(); ++round) {
    Step step = reduce_step(all, round);
    step.send.bytes = step.receive.bytes = bytes;
    add_step(step, steps);
  }
  hand_out(all, bytes, steps);
}

}  // namespace perseus

// Halving-doubling (Rabenseifner 2004): a reduce-scatter by recursive halving of the range, then an allgather that
// takes the same rounds back and doubles it.
#include <array>

#include "collective/participants.h"

namespace perseus {
namespace {

constexpr int kMostRounds = 31;

}  // namespace

void halving_doubling_steps(size_t bytes, int members, int me, std::vector<Step>* steps) {
  steps->clear();
  const Participants all(members, me);
  hand_in(all, bytes, steps);
  if (all.takes_part()) {
    // In round i the half that we keep of what we have, and the one that the other keeps.
    std::array<ByteRange, kMostRounds> kept, given;
    ByteRange whole{0, bytes};
    int rounds = 0;
    for (; 1 << rounds < all.count(); ++rounds) {
      const size_t half = even_part(whole.bytes, 2, 0).bytes;
      const ByteRange low{whole.begin, half}, high{whole.begin + half, whole.bytes - half};
      Step step = reduce_step(all, rounds);
      kept[static_cast<size_t>(rounds)] = step.own_first ? low : high;
      given[static_cast<size_t>(rounds)] = step.own_first ? high : low;
      whole = step.receive = kept[static_cast<size_t>(rounds)];
      step.send = given[static_cast<size_t>(rounds)];
      add_step(step, steps);
    }
    while (rounds-- > 0) {
      Step step;
      step.to = step.from = all.member(all.number() ^ (1 << rounds));
      step.send = kept[static_cast<size_t>(rounds)];
      step.receive = given[static_cast<size_t>(rounds)];
      add_step(step, steps);
    }
  }
  hand_out(all, bytes, steps);
}

}  // namespace perseus

// The power of two of members that halving-doubling and recursive doubling are made for, and how the others hand in
// what they have before and get the result after (Thakur et al. 2005). Pure functions and values.
#pragma once

#include "collective/steps.h"

namespace perseus {

// The power of two of members that take part after the others have handed in what they have.
class Participants {
 public:
  Participants(int members, int me) : me_(me) {
    while (count_ * 2 <= members) count_ *= 2;
    pairs_ = members - count_;
  }
  int count() const { return count_; }
  bool paired() const { return me_ < 2 * pairs_; }
  bool takes_part() const { return !paired() || me_ % 2 == 0; }
  int partner() const { return me_ ^ 1; }  // of a pair
  int number() const { return paired() ? me_ / 2 : me_ - pairs_; }
  int member(int number) const { return number < pairs_ ? 2 * number : number + pairs_; }

 private:
  const int me_;
  int count_ = 1, pairs_ = 0;
};

// Keeps what of the step has bytes.
void add_step(const Step& step, std::vector<Step>* steps);
// Before and after what the participants do.
void hand_in(const Participants& all, size_t bytes, std::vector<Step>* steps);
void hand_out(const Participants& all, size_t bytes, std::vector<Step>* steps);
// The reduction of round 0, 1, … with the participant at distance 2^round.
Step reduce_step(const Participants& all, int round);

}  // namespace perseus

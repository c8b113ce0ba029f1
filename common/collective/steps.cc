// Who sends what to whom, step by step.
#include "collective/steps.h"

#include <array>

namespace perseus {
namespace {

constexpr size_t kPartAlign = 64;
constexpr int kMostRounds = 31;

// Part `index` of `count`.
ByteRange even_part(size_t bytes, size_t count, size_t index) {
  const size_t part = ((bytes + count - 1) / count + kPartAlign - 1) / kPartAlign * kPartAlign;
  const size_t begin = std::min(part * index, bytes);
  return ByteRange{begin, std::min(part, bytes - begin)};
}

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

void add(const Step& step, std::vector<Step>* steps) {
  Step kept = step;
  if (kept.send.bytes == 0) kept.to = -1;
  if (kept.receive.bytes == 0) kept.from = -1;
  if (kept.to >= 0 || kept.from >= 0) steps->push_back(kept);
}

// Before and after what the participants do.
void hand_in(const Participants& all, size_t bytes, std::vector<Step>* steps) {
  if (!all.paired()) return;
  Step step;
  if (all.takes_part()) {
    step.from = all.partner();
    step.receive.bytes = bytes;
    step.reduce = step.own_input = step.own_first = true;
  } else {
    step.to = all.partner();
    step.send.bytes = bytes;
    step.send_input = true;
  }
  add(step, steps);
}

void hand_out(const Participants& all, size_t bytes, std::vector<Step>* steps) {
  if (!all.paired()) return;
  Step step;
  (all.takes_part() ? step.to : step.from) = all.partner();
  (all.takes_part() ? step.send : step.receive).bytes = bytes;
  add(step, steps);
}

// The reduction of round 0, 1, … with the participant at distance 2^round.
Step reduce_step(const Participants& all, int round) {
  const int distance = 1 << round;
  Step step;
  step.to = step.from = all.member(all.number() ^ distance);
  step.reduce = true;
  step.own_first = (all.number() & distance) == 0;
  step.send_input = step.own_input = round == 0 && !all.paired();
  step.last = 2 * distance == all.count();
  return step;
}

}  // namespace

void even_parts(size_t bytes, std::vector<size_t>* parts) {
  for (size_t i = 0; i < parts->size(); ++i) (*parts)[i] = even_part(bytes, parts->size(), i).bytes;
}

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
      add(step, steps);
    }
    while (rounds-- > 0) {
      Step step;
      step.to = step.from = all.member(all.number() ^ (1 << rounds));
      step.send = kept[static_cast<size_t>(rounds)];
      step.receive = given[static_cast<size_t>(rounds)];
      add(step, steps);
    }
  }
  hand_out(all, bytes, steps);
}

void recursive_doubling_steps(size_t bytes, int members, int me, std::vector<Step>* steps) {
  steps->clear();
  const Participants all(members, me);
  hand_in(all, bytes, steps);
  for (int round = 0; all.takes_part() && 1 << round < all.count(); ++round) {
    Step step = reduce_step(all, round);
    step.send.bytes = step.receive.bytes = bytes;
    add(step, steps);
  }
  hand_out(all, bytes, steps);
}

void ring_steps(const std::vector<size_t>& parts, int me, std::vector<Step>* steps) {
  steps->clear();
  const int members = static_cast<int>(parts.size());
  const auto part = [&](int number) {
    const size_t index = static_cast<size_t>((number % members + members) % members);
    ByteRange range{0, parts[index]};
    for (size_t i = 0; i < index; ++i) range.begin += parts[i];
    return range;
  };
  // members - 1 times a part that has come so far is added to and passed on, then as often one that is finished.
  for (int round = 0; round < 2 * (members - 1); ++round) {
    Step step;
    step.to = (me + 1) % members;
    step.from = (me + members - 1) % members;
    step.send = part(me - round);
    step.receive = part(me - round - 1);
    step.send_input = round == 0;
    step.reduce = step.own_input = round < members - 1;
    step.last = round == members - 2;
    add(step, steps);
  }
}

void order_for_ring(const std::vector<Piece>& pieces, std::vector<size_t>* parts, std::vector<Piece>* ordered) {
  ordered->clear();
  const size_t members = parts->size();
  for (size_t member = 0; member < members; ++member) {
    (*parts)[member] = 0;
    for (const Piece& piece : pieces) {
      const ByteRange part = even_part(piece.bytes, members, member);
      if (part.bytes == 0) continue;
      ordered->push_back(Piece{piece.in + part.begin, piece.out + part.begin, part.bytes});
      (*parts)[member] += part.bytes;
    }
  }
}

}  // namespace perseus

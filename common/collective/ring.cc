// Ring (Patarasuk and Yuan 2009): a reduce-scatter in which every part goes once round the ring and each member adds
// its own, then an allgather in which the finished parts go round again.
#include "collective/participants.h"

namespace perseus {

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
    add_step(step, steps);
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

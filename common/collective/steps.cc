// What the algorithms made of steps share: how a range is cut, who takes part, and what comes before and after.
#include "collective/participants.h"

namespace perseus {
namespace {

constexpr size_t kPartAlign = 64;

}  // namespace

ByteRange even_part(size_t bytes, size_t count, size_t index) {
  const size_t part = ((bytes + count - 1) / count + kPartAlign - 1) / kPartAlign * kPartAlign;
  const size_t begin = std::min(part * index, bytes);
  return ByteRange{begin, std::min(part, bytes - begin)};
}

void even_parts(size_t bytes, std::vector<size_t>* parts) {
  for (size_t i = 0; i < parts->size(); ++i) (*parts)[i] = even_part(bytes, parts->size(), i).bytes;
}

void add_step(const Step& step, std::vector<Step>* steps) {
  Step kept = step;
  if (kept.send.bytes == 0) kept.to = -1;
  if (kept.receive.bytes == 0) kept.from = -1;
  if (kept.to >= 0 || kept.from >= 0) steps->push_back(kept);
}

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
  add_step(step, steps);
}

void hand_out(const Participants& all, size_t bytes, std::vector<Step>* steps) {
  if (!all.paired()) return;
  Step step;
  (all.takes_part() ? step.to : step.from) = all.partner();
  (all.takes_part() ? step.send : step.receive).bytes = bytes;
  add_step(step, steps);
}

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

}  // namespace perseus

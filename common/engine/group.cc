// Wires negotiation, rounds and execution of one group together.
#include "engine/group.h"

#include <algorithm>

namespace perseus {
namespace {

int index_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Links to the members at distance 1, 2, 4, … in the given direction.
std::vector<Link*> dissemination_links(const std::vector<int>& ranks, int me, int direction, uint32_t group,
                                       const Group::LinkTo& link_to) {
  std::vector<Link*> links;
  const int size = static_cast<int>(ranks.size());
  for (int distance = 1; distance < size; distance *= 2) {
    const int other = ((me + direction * distance) % size + size) % size;
    links.push_back(&link_to(ranks[static_cast<size_t>(other)], Channel{group, kControlStream}));
  }
  return links;
}

}  // namespace

Group::Group(uint32_t id, std::vector<int> ranks, int my_rank, uint32_t epoch, const ExecutionSettings& settings,
             int64_t cycle_ns, LinkTo link_to, MakeEntry make_entry, Execution::OutputsOf outputs_of)
    : id_(id),
      ranks_(std::move(ranks)),
      me_(index_in(ranks_, my_rank)),
      cycle_ns_(cycle_ns),
      negotiation_(me_, ranks_, std::move(make_entry)),
      round_(dissemination_links(ranks_, me_, +1, id, link_to), dissemination_links(ranks_, me_, -1, id, link_to),
             static_cast<int>(ranks_.size()), me_, epoch, id),
      execution_(
          settings, ranks_, me_, epoch, id,
          [this, link_to](uint32_t stream) {
            std::vector<Link*> links;
            for (size_t i = 0; i < ranks_.size(); ++i)
              links.push_back(static_cast<int>(i) == me_ ? nullptr : &link_to(ranks_[i], Channel{id_, stream}));
            return links;
          },
          std::move(outputs_of)) {}

bool Group::may_begin(bool eager, size_t enough_bytes) const {
  if (closed_ || !negotiation_.has_news()) return false;
  if (cycle_ns_ > 0 && now_ns() - begun_ns_ < cycle_ns_) return false;
  return eager || !execution_.busy() || negotiation_.news_bytes() >= enough_bytes;
}

// Is a peer's round to be joined now? Without anything of ours to offer, nothing can become ready in it: then it is
// cheaper to wait until we submit something, so that one round serves both. Not for long: peers want to know who is
// missing, and what is wrong.
bool Group::joins() {
  if (!round_.called()) {
    called_ns_ = 0;
    return false;
  }
  if (closed_ || negotiation_.has_pending()) return true;
  const int64_t now = now_ns();
  if (called_ns_ == 0) called_ns_ = now;
  return now - called_ns_ >= kJoinWithin;
}

bool Group::step(bool eager, size_t enough_bytes, std::vector<Entry*>* finished,
                 std::vector<std::pair<Entry*, std::string>>* failed) {
  bool moved = negotiation_.collect();
  if (round_.idle() && (may_begin(eager, enough_bytes) || joins())) {
    called_ns_ = 0;
    negotiation_.snapshot(&round_.content());
    if (cycle_ns_ > 0) begun_ns_ = now_ns();
    round_.begin();
    moved = true;
    if (round_.idle()) {  // a group of one
      negotiation_.apply(round_.content(), &ready_, failed);
    }
  }
  if (!round_.idle()) {
    moved |= round_.step();
    if (round_.idle()) negotiation_.apply(round_.content(), &ready_, failed);
  }
  if (!ready_.empty()) {
    execution_.add(ready_, finished);
    ready_.clear();
  }
  moved |= execution_.step(finished);
  return moved;
}

}  // namespace perseus

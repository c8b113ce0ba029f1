// Which stages a member takes part in.
#include "collective/hierarchical_broadcast.h"

#include <algorithm>

#include "base/error.h"

namespace perseus {

void HierarchicalBroadcast::start(int root) {
  root_ = root;
  stage_ = Stage::kInner;
  pieces_.clear();
}

bool HierarchicalBroadcast::next(Step* step) {
  step->plan = &plan_;
  step->sizes_vary = false;
  const auto in_host = std::find(levels_.inner.begin(), levels_.inner.end(), root_);
  const bool at_home = in_host != levels_.inner.end();
  if (stage_ == Stage::kInner) {
    stage_ = Stage::kAcross;
    if (at_home && works_inside()) {
      plan(pieces_, static_cast<int>(in_host - levels_.inner.begin()));
      step->level = Level::kInner;
      return true;
    }
  }
  if (stage_ == Stage::kAcross) {
    stage_ = Stage::kSpread;
    cut();
    if (levels_.carries()) {
      plan(shards_[static_cast<size_t>(levels_.inner_me)], levels_.home[static_cast<size_t>(root_)]);
      step->level = Level::kAcross;
      return true;
    }
  }
  const bool spreads = stage_ == Stage::kSpread && !at_home && works_inside();
  stage_ = Stage::kDone;
  if (!spreads) return false;
  plan_inner_spread(levels_, shards_, DType::kUInt8, &plan_);
  step->level = Level::kInner;
  return true;
}

void HierarchicalBroadcast::plan(const std::vector<Piece>& pieces, int root) {
  plan_.clear();
  plan_.collective = Collective::kBroadcast;
  plan_.reduction.dtype = DType::kUInt8;
  plan_.pieces = pieces;
  plan_.root = root;
}

// A root that is alone in its host still has its buffer where it was given. Everybody else has it in `out`.
void HierarchicalBroadcast::cut() {
  const bool as_given = levels_.inner.size() == 1 && levels_.inner[0] == root_;
  for (std::vector<Piece>& shard : shards_) shard.clear();
  if (!as_given)
    for (Piece& piece : pieces_) piece.in = piece.out;
  cut_into_shards(pieces_.data(), pieces_.size(), &shards_);
}

Byte* HierarchicalBroadcast::allocate(const std::vector<size_t>&, const std::vector<uint64_t>&) {
  fail(ErrorKind::kInternal, "[collective] a broadcast asks for memory");
}

}  // namespace perseus

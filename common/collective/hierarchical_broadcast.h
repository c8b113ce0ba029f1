// A broadcast in stages: inside the root's host, of every shard across the hosts, and an allgather inside each of the
// others. So no network carries the buffer more than once, however many ranks a host has.
#pragma once

#include <vector>

#include "base/progress_lock.h"
#include "collective/inner_exchanges.h"
#include "collective/staged.h"

namespace perseus {

class HierarchicalBroadcast final : public Staged {
 public:
  explicit HierarchicalBroadcast(const Levels& levels) : levels_(levels), shards_(static_cast<size_t>(levels.shards)) {}

  // Begins anew; `root`: index in the group.
  void start(int root) PERSEUS_REQUIRES(progress_lock);
  // Before the first next(): of the root, `in` and `out`, which do not overlap where they differ; else `out`.
  void add(const Piece& piece) PERSEUS_REQUIRES(progress_lock) { pieces_.push_back(piece); }
  bool next(Step* step) override PERSEUS_REQUIRES(progress_lock);
  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override
      PERSEUS_REQUIRES(progress_lock);

 private:
  enum class Stage { kInner, kAcross, kSpread, kDone };

  void plan(const std::vector<Piece>& pieces, int root);
  void cut();
  bool works_inside() const { return levels_.inner.size() > 1; }

  const Levels levels_;
  int root_ = 0;
  Stage stage_ = Stage::kInner;
  std::vector<Piece> pieces_;
  Shards shards_;
  ExchangePlan plan_;
};

}  // namespace perseus

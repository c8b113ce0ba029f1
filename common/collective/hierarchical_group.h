// A Group made of groups: of all members, of those that share memory with this one, and of those across that carry the
// same shard. It carries out work in stages, each in the group of its level, and has the members agree first where the
// work itself could not be rolled back.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/group.h"
#include "collective/staged.h"

namespace perseus {

class HierarchicalGroup final : public Group, private Operation {
 public:
  // The groups of one level, the preferred one first. The last one serves whatever has no stages, and can roll back
  // what moves no bytes.
  using MakeGroups = std::function<std::vector<std::unique_ptr<Group>>(Level)>;
  // `make`: called when a level is first needed.
  HierarchicalGroup(const Levels& levels, MakeGroups make);

  bool serves(const Work& work) const override PERSEUS_REQUIRES(progress_lock) {
    return work.device == Device() || work.images != nullptr;
  }
  bool rolls_back(const Work&) const override PERSEUS_REQUIRES(progress_lock) { return true; }
  Operation& plan(const Work& work) override PERSEUS_REQUIRES(progress_lock);
  size_t staging_bytes() const override PERSEUS_REQUIRES(progress_lock);

 private:
  bool step() override PERSEUS_REQUIRES(progress_lock);
  bool done() const override PERSEUS_REQUIRES(progress_lock) { return done_; }
  void abort() noexcept override PERSEUS_REQUIRES(progress_lock);
  bool agreed() const override PERSEUS_REQUIRES(progress_lock) { return !first_ || waits_ || current_->agreed(); }
  void roll_back(const std::vector<bool>& began) override PERSEUS_REQUIRES(progress_lock);
  bool wakes() const override PERSEUS_REQUIRES(progress_lock) { return done_ || (!waits_ && current_->wakes()); }
  bool computes() const override PERSEUS_REQUIRES(progress_lock) { return !done_ && waits_; }
  std::vector<int> waiting_for() const override PERSEUS_REQUIRES(progress_lock);

  Group& group_for(Level level, const Work& work) PERSEUS_REQUIRES(progress_lock);
  void begin(Level level, const Work& work) PERSEUS_REQUIRES(progress_lock);
  bool go_on() PERSEUS_REQUIRES(progress_lock);
  bool begin_next() PERSEUS_REQUIRES(progress_lock);

  const Levels levels_;
  const MakeGroups make_;
  std::vector<std::unique_ptr<Group>> groups_[kLevels] PERSEUS_GUARDED_BY(progress_lock);
  const ExchangePlan nothing_;  // for members that exchange headers alone

  Work work_ PERSEUS_GUARDED_BY(progress_lock);
  Operation* current_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;  // one of the work's, or what comes before it
  Level level_ PERSEUS_GUARDED_BY(progress_lock) = Level::kAll;     // of the current one
  bool first_ PERSEUS_GUARDED_BY(progress_lock) = false;            // the current one is the first
  bool plan_follows_ PERSEUS_GUARDED_BY(progress_lock) = false;     // once all have agreed
  bool waits_ PERSEUS_GUARDED_BY(progress_lock) = false;            // until the work is ready; no operation is current
  bool rolled_back_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool done_ PERSEUS_GUARDED_BY(progress_lock) = true;
};

}  // namespace perseus

// A Group made of groups: of all members, of those that share memory with this one, and of those across that carry the
// same shard. It carries out work in stages, each in the group of its level, and has the members agree first where the
// work itself could not be rolled back. Used by one progress engine.
#pragma once

#include <functional>
#include <memory>
#include <vector>

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

  bool serves(const Work& work) const override { return work.device == Device(); }
  bool rolls_back(const Work&) const override { return true; }
  Operation& plan(const Work& work) override;
  size_t staging_bytes() const override;

 private:
  bool step() override;
  bool done() const override { return done_; }
  void abort() noexcept override;
  bool agreed() const override { return !first_ || current_->agreed(); }
  void roll_back(const std::vector<bool>& began) override;
  bool wakes() const override { return done_ || current_->wakes(); }
  std::vector<int> waiting_for() const override;

  Group& group_for(Level level, const Work& work);
  void begin(Level level, const Work& work);
  bool begin_next();

  const Levels levels_;
  const MakeGroups make_;
  std::vector<std::unique_ptr<Group>> groups_[kLevels];
  const ExchangePlan nothing_;  // for members that exchange headers alone

  Work work_;
  Operation* current_ = nullptr;  // one of the work's, or what comes before it
  Level level_ = Level::kAll;     // of the current one
  bool first_ = false;            // the current one is the first
  bool plan_follows_ = false;     // once all have agreed
  bool rolled_back_ = false;
  bool done_ = true;
};

}  // namespace perseus

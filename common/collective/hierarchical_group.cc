// One piece of work at a time, whose stages follow each other.
#include "collective/hierarchical_group.h"

namespace perseus {

HierarchicalGroup::HierarchicalGroup(const Levels& levels, MakeGroups make) : levels_(levels), make_(std::move(make)) {}

Group& HierarchicalGroup::group_for(Level level, const Work& work) {
  std::vector<std::unique_ptr<Group>>& groups = groups_[static_cast<int>(level)];
  if (groups.empty()) groups = make_(level);
  for (const std::unique_ptr<Group>& group : groups)
    if (group->serves(work)) return *group;
  return *groups.back();
}

void HierarchicalGroup::begin(Level level, const Work& work) {
  level_ = level;
  current_ = &group_for(level, work).plan(work);
}

Operation& HierarchicalGroup::plan(const Work& work) {
  work_ = work;
  plan_follows_ = waits_ = rolled_back_ = done_ = false;
  first_ = true;
  const bool scheduled = work.schedule != 0;
  if (work.staged == nullptr && (!scheduled || group_for(Level::kAll, work).rolls_back(work))) {
    begin(Level::kAll, work);
  } else if (scheduled) {
    plan_follows_ = work.staged == nullptr;
    Work agreement;
    agreement.plan = &nothing_;
    agreement.schedule = work.schedule;
    level_ = Level::kAll;
    group_for(level_, agreement);
    current_ = &groups_[static_cast<int>(level_)].back()->plan(agreement);
  } else {
    done_ = !go_on();
  }
  return *this;
}

// After each operation, and before the first of several; false when nothing follows.
bool HierarchicalGroup::go_on() {
  if (rolled_back_) return false;
  waits_ = work_.staged != nullptr && !work_.staged->ready();
  return waits_ || begin_next();
}

bool HierarchicalGroup::begin_next() {
  if (plan_follows_) {
    plan_follows_ = false;
    work_.schedule = 0;
    begin(Level::kAll, work_);
    return true;
  }
  Staged::Step step;
  if (work_.staged == nullptr || !work_.staged->next(&step)) return false;
  Work stage;
  stage.plan = step.plan;
  stage.sink = step.sizes_vary ? work_.staged : nullptr;
  stage.device = work_.device;
  stage.images = work_.images;
  begin(step.level, stage);
  return true;
}

size_t HierarchicalGroup::staging_bytes() const {
  size_t bytes = 0;
  for (const auto& level : groups_)
    for (const std::unique_ptr<Group>& group : level) bytes += group->staging_bytes();
  return bytes;
}

bool HierarchicalGroup::step() {
  if (done_) return false;
  if (waits_) {
    if (!work_.staged->ready()) return false;
    waits_ = false;
    done_ = !begin_next();
    return true;
  }
  const bool moved = current_->step();
  if (current_->done()) {
    done_ = !go_on();
    first_ = false;
  }
  return moved;
}

void HierarchicalGroup::abort() noexcept {
  if (!done_ && !waits_) current_->abort();
  done_ = true;
}

void HierarchicalGroup::roll_back(const std::vector<bool>& began) {
  rolled_back_ = true;
  current_->roll_back(began);
}

std::vector<int> HierarchicalGroup::waiting_for() const {
  if (done_ || waits_) return {};
  const std::vector<int> all = levels_.members_of(level_);
  std::vector<int> members;
  for (int member : current_->waiting_for()) members.push_back(all[static_cast<size_t>(member)]);
  return members;
}

}  // namespace perseus

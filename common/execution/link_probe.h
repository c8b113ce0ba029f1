// The operation that measures the links between the inner groups of a group.
#pragma once

#include <functional>
#include <vector>

#include "base/progress_lock.h"
#include "collective/staged.h"
#include "topology/link_speed.h"

namespace perseus {

// Times exact allreduces across, doubled in size until they take long enough, and ends with the largest values of all
// ranks, so that all go on with the same numbers. All ranks begin it at the same place in the group's order, with
// nothing else of the group under way; about 0.1 s.
class LinkProbe final : public Staged {
 public:
  // `also`: measured by this rank alone once the links are done; as many values on every rank. seconds_per_byte: known
  // already, > 0, or 0 = find out.
  LinkProbe(const Levels& levels, double seconds_per_byte, std::function<std::vector<double>()> also);

  bool next(Step* step) override PERSEUS_REQUIRES(progress_lock);
  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override
      PERSEUS_REQUIRES(progress_lock);

  // When next() has said false: the same on all ranks.
  const LinkSpeed& speed() const PERSEUS_REQUIRES(progress_lock) { return speed_; }
  const std::vector<double>& also() const PERSEUS_REQUIRES(progress_lock) { return also_values_; }

 private:
  enum class Stage { kSize, kLatency, kBytes, kAgree };

  void plan_across(size_t bytes) PERSEUS_REQUIRES(progress_lock);
  void plan_agreement() PERSEUS_REQUIRES(progress_lock);
  void choose_size(double seconds_of_first) PERSEUS_REQUIRES(progress_lock);
  bool across(Step* step, size_t bytes, int times) PERSEUS_REQUIRES(progress_lock);
  double sent_bytes() const PERSEUS_REQUIRES(progress_lock);

  const Levels levels_;
  const Level across_;
  const double known_;
  const std::function<std::vector<double>()> also_;

  Stage stage_ PERSEUS_GUARDED_BY(progress_lock) = Stage::kSize;
  int done_ PERSEUS_GUARDED_BY(progress_lock) = 0;          // exchanges of this stage
  int64_t begun_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // of the exchange under way
  size_t large_ PERSEUS_GUARDED_BY(progress_lock) = 0;      // bytes of an exchange that tells the speed
  std::vector<Byte> memory_ PERSEUS_GUARDED_BY(progress_lock);
  // To be agreed on: seconds of exchanges, and what else was measured.
  std::vector<double> values_ PERSEUS_GUARDED_BY(progress_lock);
  ExchangePlan plan_ PERSEUS_GUARDED_BY(progress_lock);
  LinkSpeed speed_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<double> also_values_ PERSEUS_GUARDED_BY(progress_lock);
};

}  // namespace perseus

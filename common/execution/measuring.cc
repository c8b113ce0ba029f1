// Measures links and codecs before the first tensor that asks for a codec by their speed.
//
// What becomes ready does so in the same order on all ranks, so all of them stop at the same entry, finish what comes
// before it, measure together, and go on with the same numbers: the choice takes effect at one place on all ranks, and
// a tensor's codec, on which what is held back depends, is the same from its first gradient on.
#include "execution/execution.h"

namespace perseus {

bool Execution::waits_for_speeds(const std::vector<Entry*>& ready) {
  if (!waiting_.empty()) return true;
  if (speeds_.link.number > 0 || !settings_.measures) return false;
  for (const Entry* entry : ready)
    if (entry->description.compression.automatic) return levels(false).groups > 1;
  return false;
}

void Execution::begin_probe() {
  const auto measure = [this] { return to_values(measure_codecs(settings_.auto_codecs)); };
  probe_ = std::make_unique<LinkProbe>(levels(false), settings_.link_seconds_per_byte, measure);
  std::unique_ptr<Bucket> bucket = fresh_bucket();
  bucket->staged = probe_.get();
  bucket->batch = Batch();
  streams_[0].queue.push_back(std::move(bucket));
  ++in_flight_;
}

void Execution::finish_probe(std::vector<Entry*>* finished) {
  const Levels& levels = this->levels(false);
  speeds_.link = probe_->speed();
  speeds_.codecs = from_values(probe_->also());
  speeds_.groups = levels.groups;
  speeds_.shards = levels.shards;
  speeds_.matrix_rank = settings_.auto_codecs.back().matrix_rank;
  probe_.reset();
  if (me_ == 0) settings_.log("[codec] " + describe_choice(speeds_, settings_.auto_codecs));
  std::vector<std::vector<Entry*>> rounds;
  rounds.swap(waiting_);
  for (const std::vector<Entry*>& ready : rounds) add(ready, finished);
}

}  // namespace perseus

// Measures links and codecs before the first tensor that asks for a codec by their speed, and links again later.
//
// What becomes ready does so in the same order on all ranks, so all of them stop at the same entry, finish what comes
// before it, measure together, and go on with the same numbers: the choice takes effect at one place on all ranks. A
// later measurement comes before the entry for which some rank has found the last one outdated.
#include <algorithm>

#include "execution/execution.h"

namespace perseus {

bool Execution::waits_for_speeds(const std::vector<Entry*>& ready) { return !waiting_.empty() || needs_speeds(ready); }

bool Execution::needs_speeds(const std::vector<Entry*>& ready) {
  if (!settings_.measures) return false;
  const int number = automatic_->speeds().link.number;
  for (const Entry* entry : ready) {
    const Description& d = entry->description;
    if (d.compression.automatic && (number == 0 || d.outdated == number)) return levels(false).groups > 1;
  }
  return false;
}

void Execution::begin_probe() {
  const bool first = automatic_->speeds().link.number == 0;
  const auto measure = [this, first] {
    return first ? to_values(measure_codecs(settings_.auto_codecs, settings_.threads)) : std::vector<double>();
  };
  probe_ = std::make_unique<LinkProbe>(levels(false), settings_.link_seconds_per_byte, measure);
  std::unique_ptr<Bucket> bucket = fresh_bucket();
  bucket->staged = probe_.get();
  bucket->batch = Batch();
  streams_[0].queue.push_back(std::move(bucket));
  ++in_flight_;
}

void Execution::finish_probe(std::vector<Entry*>* finished) {
  const Levels& levels = this->levels(false);
  Speeds speeds = automatic_->speeds();
  const int number = speeds.link.number + 1;
  speeds.link = probe_->speed();
  // The probe has gone over one interface. Gradients go over as many as there are streams for.
  const Topology& topology = *settings_.topology;
  if (settings_.link_seconds_per_byte <= 0 && topology.spans_nodes(ranks_))
    speeds.link.seconds_per_byte /= std::min(topology.interfaces(), waiting_.front().in_force.tuning.streams);
  speeds.link.number = number;
  if (number == 1) speeds.codecs = from_values(probe_->also());
  speeds.groups = levels.groups;
  speeds.shards = levels.shards;
  probe_.reset();
  if (automatic_->adopt(speeds, now_ns()) && me_ == 0)
    settings_.log("[codec] " + describe_choice(speeds, settings_.auto_codecs));
  while (!waiting_.empty() && !needs_speeds(waiting_.front().ready)) {
    place_in_buckets(waiting_.front().ready, waiting_.front().in_force, finished, Batch());
    waiting_.erase(waiting_.begin());
  }
}

}  // namespace perseus

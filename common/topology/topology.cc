// PERSEUS_ALLREDUCE_MODE, LIGHT_2D_ALLREDUCE and LIGHT_HIERARCHICAL_THRESHOLD.
#include "topology/topology.h"

#include <algorithm>

#include "base/hash.h"

namespace perseus {

Topology::Topology(const Config& config) {
  const auto mode = config.choice<AllreduceMode>();
  const auto two_d = config.choice<TwoD>();
  settings_.one_shard = mode == AllreduceMode::kOneRankPerHost;
  flat_ = (mode == AllreduceMode::kFlat && two_d != TwoD::kOn) || (two_d == TwoD::kOff && !settings_.one_shard);
  most_staged_ = static_cast<size_t>(config.integer(Var::kHierarchicalThreshold));
  if (two_d == TwoD::kOn) settings_.most_inner = static_cast<int>(config.integer(Var::kIntraSize));
  if (config.choice<CpuOperations>() == CpuOperations::kMpi) {
    // MPI has levels of its own, of which its collectives make the best.
    flat_ = true;
    settings_ = LevelSettings();
  }
}

void Topology::set_locations(std::vector<Location> locations) {
  locations_ = std::move(locations);
  const auto fewer = [](const Location& a, const Location& b) { return a.interfaces < b.interfaces; };
  interfaces_ = std::min_element(locations_.begin(), locations_.end(), fewer)->interfaces;
  nccl_ = std::all_of(locations_.begin(), locations_.end(), [](const Location& each) { return each.nccl; });
}

Levels Topology::of(const std::vector<int>& ranks, int me) const {
  // Ranks that all share memory are one group in any case: there is nothing between them to send less of.
  if (flat_ && spans_nodes(ranks)) return undivided(static_cast<int>(ranks.size()), me);
  return by_host(ranks, me);
}

Levels Topology::by_host(const std::vector<int>& ranks, int me) const {
  if (locations_.empty()) return undivided(static_cast<int>(ranks.size()), me);
  std::vector<int> nodes;
  for (int rank : ranks) nodes.push_back(locations_[static_cast<size_t>(rank)].node);
  return divide(nodes, me, settings_);
}

uint64_t Topology::layout(const std::vector<size_t>& bytes, const Levels& undivided, const Levels& divided) const {
  const auto staged = [this](size_t each) { return stages(each); };
  if (std::all_of(bytes.begin(), bytes.end(), staged)) return layout_of(divided);
  if (std::none_of(bytes.begin(), bytes.end(), staged)) return layout_of(undivided);
  uint64_t layout = kFnvBasis;
  for (size_t each : bytes) layout = (layout ^ layout_of(staged(each) ? divided : undivided)) * kFnvPrime;
  return layout;
}

bool Topology::spans_nodes(const std::vector<int>& ranks) const {
  if (locations_.empty()) return true;
  const auto node = [&](int rank) { return locations_[static_cast<size_t>(rank)].node; };
  return std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return node(rank) != node(ranks[0]); });
}

}  // namespace perseus

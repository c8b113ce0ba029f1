// PERSEUS_ALLREDUCE_MODE, LIGHT_2D_ALLREDUCE and LIGHT_HIERARCHICAL_THRESHOLD.
#include "engine/division.h"

#include <algorithm>

#include "base/hash.h"
#include "engine/request.h"

namespace perseus {
namespace {

enum Mode : int64_t { kAuto, kFlat, kTwoLevel };  // choices of PERSEUS_ALLREDUCE_MODE
enum TwoD : int64_t { kAsMode, kOff, kOn };       // choices of LIGHT_2D_ALLREDUCE

}  // namespace

Division::Division(const Config& config) {
  const int64_t mode = config.integer(Var::kAllreduceMode), two_d = config.integer(Var::kTwoD);
  flat_ = (mode == kFlat && two_d != kOn) || (two_d == kOff && mode != kTwoLevel);
  settings_.one_shard = mode == kTwoLevel;
  most_staged_ = static_cast<size_t>(config.integer(Var::kHierarchicalThreshold));
  if (two_d == kOn) settings_.most_inner = static_cast<int>(config.integer(Var::kIntraSize));
}

void Division::set_places(std::vector<Place> places) {
  places_ = std::move(places);
  const auto fewer = [](const Place& a, const Place& b) { return a.interfaces < b.interfaces; };
  interfaces_ = std::min_element(places_.begin(), places_.end(), fewer)->interfaces;
}

Levels Division::of(const std::vector<int>& ranks, int me) const {
  // Ranks that all share memory are one group in any case: there is nothing between them to send less of.
  if (places_.empty() || (flat_ && spans_nodes(ranks))) return undivided(static_cast<int>(ranks.size()), me);
  std::vector<int> nodes;
  for (int rank : ranks) nodes.push_back(places_[static_cast<size_t>(rank)].node);
  return divide(nodes, me, settings_);
}

uint64_t Division::layout(const Description& description, const Levels& undivided, const Levels& divided) const {
  const std::vector<TensorDescription>& tensors = description.tensors;
  const auto staged = [this](const TensorDescription& tensor) { return stages(tensor.bytes()); };
  if (std::all_of(tensors.begin(), tensors.end(), staged)) return layout_of(divided);
  if (std::none_of(tensors.begin(), tensors.end(), staged)) return layout_of(undivided);
  uint64_t layout = kFnvBasis;
  for (const TensorDescription& tensor : tensors)
    layout = (layout ^ layout_of(staged(tensor) ? divided : undivided)) * kFnvPrime;
  return layout;
}

bool Division::spans_nodes(const std::vector<int>& ranks) const {
  if (places_.empty()) return true;
  const auto node = [&](int rank) { return places_[static_cast<size_t>(rank)].node; };
  return std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return node(rank) != node(ranks[0]); });
}

}  // namespace perseus

// PERSEUS_ALLREDUCE_MODE and LIGHT_2D_ALLREDUCE.
#include "engine/division.h"

#include <algorithm>

namespace perseus {
namespace {

enum Mode : int64_t { kAuto, kFlat, kTwoLevel };  // choices of PERSEUS_ALLREDUCE_MODE
enum TwoD : int64_t { kAsMode, kOff, kOn };       // choices of LIGHT_2D_ALLREDUCE

}  // namespace

Division::Division(const Config& config) {
  const int64_t mode = config.integer(Var::kAllreduceMode), two_d = config.integer(Var::kTwoD);
  flat_ = (mode == kFlat && two_d != kOn) || (two_d == kOff && mode != kTwoLevel);
  settings_.one_shard = mode == kTwoLevel;
  if (two_d == kOn) settings_.most_inner = static_cast<int>(config.integer(Var::kIntraSize));
}

Levels Division::of(const std::vector<int>& ranks, int me) const {
  if (flat_ || node_of_.empty()) return undivided(static_cast<int>(ranks.size()), me);
  std::vector<int> nodes;
  for (int rank : ranks) nodes.push_back(node_of_[static_cast<size_t>(rank)]);
  return divide(nodes, me, settings_);
}

bool Division::spans_nodes(const std::vector<int>& ranks) const {
  if (node_of_.empty()) return true;
  const auto node = [&](int rank) { return node_of_[static_cast<size_t>(rank)]; };
  return std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return node(rank) != node(ranks[0]); });
}

}  // namespace perseus

// How the settings and the placement of ranks divide a group for its allreduces. Plain values.
#pragma once

#include <vector>

#include "base/config.h"
#include "collective/levels.h"

namespace perseus {

class Division {
 public:
  Division() = default;
  explicit Division(const Config& config);

  // node_of[rank] of the world; until it is known every rank counts as a node.
  void set_nodes(std::vector<int> node_of) { node_of_ = std::move(node_of); }
  // For a group of these ranks of the world, of which we are number `me`.
  Levels of(const std::vector<int>& ranks, int me) const;
  // Do any two of them not share memory?
  bool spans_nodes(const std::vector<int>& ranks) const;

 private:
  bool flat_ = false;
  LevelSettings settings_;
  std::vector<int> node_of_;
};

}  // namespace perseus

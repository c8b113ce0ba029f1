// How the settings and the placement of ranks divide a group for its allreduces. Plain values.
#pragma once

#include <vector>

#include "base/config.h"
#include "topology/levels.h"

namespace perseus {

// Where a rank is, as all ranks know.
struct Location {
  int node = 0;        // the lowest rank that it shares memory with, maybe itself
  int interfaces = 1;  // over which it has connections at once
  bool nccl = false;   // NCCL may be tried between its host and others
};

class Topology {
 public:
  Topology() = default;
  explicit Topology(const Config& config);

  // locations[rank] of the world; until they are known every rank counts as a node.
  void set_locations(std::vector<Location> locations);
  // For a group of these ranks of the world, of which we are number `me`.
  Levels of(const std::vector<int>& ranks, int me) const;
  // The same, but divided even if all ranks are to be treated alike: for gradients that stay inside hosts.
  Levels by_host(const std::vector<int>& ranks, int me) const;
  // Is a tensor of so many bytes reduced in stages, where there are any? Larger ones go among all ranks alike.
  bool stages(size_t bytes) const { return bytes <= most_staged_; }
  // A number for how the chunks of tensors of so many bytes are divided among senders and owners, if they are encoded.
  uint64_t layout(const std::vector<size_t>& bytes, const Levels& undivided, const Levels& divided) const;
  // Do any two of them not share memory?
  bool spans_nodes(const std::vector<int>& ranks) const;
  // Used at once by every rank of the world.
  int interfaces() const { return interfaces_; }
  // May NCCL be tried between hosts? Of the world.
  bool nccl_between() const { return nccl_; }

 private:
  bool flat_ = false;
  size_t most_staged_ = 0;
  LevelSettings settings_;
  std::vector<Location> locations_;
  int interfaces_ = 1;
  bool nccl_ = false;
};

}  // namespace perseus

// How fast the links between the inner groups of a group are. Plain values.
#pragma once

namespace perseus {

// Of the links that a shard crosses (Level::kAcross, all shards at once): a rank sends n bytes to a peer, and receives
// as many, in latency_s + n * seconds_per_byte.
struct LinkSpeed {
  int number = 0;  // of the measurement, counted from 1 in each group; 0 = not measured
  double latency_s = 0;
  double seconds_per_byte = 0;
};

}  // namespace perseus

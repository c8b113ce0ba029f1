// How the members of a group are divided for reductions in stages: inner groups whose members share memory, and the
// groups across them that carry a shard each. Plain values; the same input gives the same levels on all ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace perseus {

enum class Level : uint8_t { kAll, kInner, kAcross };
constexpr int kLevels = 3;

struct LevelSettings {
  int most_inner = 0;      // members of an inner group; 0 = as many as share memory
  bool one_shard = false;  // two-level: one member of each inner group speaks for it. Else as many as the smallest has
};

struct Levels {
  int members = 1;          // of the group
  int groups = 1;           // inner ones
  std::vector<int> inner;   // indices in the group of those in our inner group, ascending
  int inner_me = 0;         // our index in it
  std::vector<int> home;    // of each member, its inner group's number, by which `across` is ordered
  int shards = 1;           // members of each inner group that take part across
  std::vector<int> across;  // indices in the group of those that carry our shard, one for each inner group
  int across_me = 0;

  bool carries() const { return inner_me < shards; }
  // Indices in the group of those that work together at a level.
  std::vector<int> members_of(Level level) const;
  // Is there more than one level?
  bool divided() const { return groups > 1 && groups < members; }
};

// node_of[i]: any number that tells the nodes (hosts) of a group's members apart. `me`: our index.
Levels divide(const std::vector<int>& node_of, int me, const LevelSettings& settings);
// All members as one inner group.
Levels together(int members, int me);
// Every member by itself.
Levels undivided(int members, int me);
// Which chunks of an encoded tensor this member sends and owns (see hierarchical_allreduce.cc), as a number: up to
// 65535 members.
uint64_t layout_of(const Levels& levels);

}  // namespace perseus

// Inner groups in the order of their first members.
#include "topology/levels.h"

#include <algorithm>
#include <numeric>

namespace perseus {

Levels divide(const std::vector<int>& node_of, int me, const LevelSettings& settings) {
  std::vector<std::vector<int>> groups;
  std::vector<int> nodes;  // of each group
  std::vector<int> home;
  const int members = static_cast<int>(node_of.size());
  for (int i = 0; i < members; ++i) {
    // The last group of the node is the one that is being filled.
    size_t g = groups.size();
    while (g > 0 && nodes[g - 1] != node_of[static_cast<size_t>(i)]) --g;
    const bool full = g > 0 && settings.most_inner > 0 && static_cast<int>(groups[g - 1].size()) >= settings.most_inner;
    if (g == 0 || full) {
      groups.emplace_back();
      nodes.push_back(node_of[static_cast<size_t>(i)]);
      g = groups.size();
    }
    groups[g - 1].push_back(i);
    home.push_back(static_cast<int>(g - 1));
  }
  Levels levels;
  levels.members = members;
  levels.home = std::move(home);
  levels.groups = static_cast<int>(groups.size());
  size_t fewest = groups[0].size();
  for (const std::vector<int>& group : groups) {
    fewest = std::min(fewest, group.size());
    const auto found = std::find(group.begin(), group.end(), me);
    if (found == group.end()) continue;
    levels.inner = group;
    levels.inner_me = static_cast<int>(found - group.begin());
  }
  levels.shards = settings.one_shard ? 1 : static_cast<int>(fewest);
  if (!levels.carries()) return levels;
  for (const std::vector<int>& group : groups) {
    const int member = group[static_cast<size_t>(levels.inner_me)];
    if (member == me) levels.across_me = static_cast<int>(levels.across.size());
    levels.across.push_back(member);
  }
  return levels;
}

Levels together(int members, int me) {
  return divide(std::vector<int>(static_cast<size_t>(members)), me, LevelSettings());
}

Levels undivided(int members, int me) {
  std::vector<int> nodes;
  for (int i = 0; i < members; ++i) nodes.push_back(i);
  return divide(nodes, me, LevelSettings());
}

std::vector<int> Levels::members_of(Level level) const {
  if (level == Level::kInner) return inner;
  if (level == Level::kAcross) return across;
  std::vector<int> all(static_cast<size_t>(members));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

uint64_t layout_of(const Levels& levels) {
  uint64_t layout = 0;
  for (const size_t part : {static_cast<size_t>(levels.shards), static_cast<size_t>(levels.inner_me),
                            levels.across.size(), static_cast<size_t>(levels.across_me)})
    layout = layout << 16 | part;
  return layout;
}

}  // namespace perseus

// The arithmetic of docs/algorithms.md.
#include "topology/allreduce_cost.h"

namespace perseus {
namespace {

constexpr size_t kSmallBytes = 16 * 1024;
constexpr size_t kSmallTraffic = 128 * 1024;

// What is gained must be worth that bits are no longer those of rank order, and those of halves are rounded more often:
// among few members it is a latency at most.
constexpr double kClearly = 0.75;
constexpr int kMany = 5;

struct Tree {
  int rounds = 0;        // of the members that take part
  bool surplus = false;  // others hand in their bytes before and get the result after
  double participants = 1;
};

Tree tree_of(int members) {
  Tree tree;
  while (2 << tree.rounds <= members) ++tree.rounds;
  tree.participants = 1 << tree.rounds;
  tree.surplus = 1 << tree.rounds < members;
  return tree;
}

}  // namespace

bool everyone_reduces(size_t bytes, int members) {
  return members > 1 && bytes <= kSmallBytes && bytes * static_cast<size_t>(members - 1) <= kSmallTraffic;
}

double allreduce_cost(Algorithm algorithm, int members, size_t bytes, const LinkCost& link) {
  if (members < 2) return 0;
  const double others = members - 1, size = static_cast<double>(bytes);
  const double share = others / members;
  const double step = link.latency + link.message;
  const double sent = link.byte, reduced = 3 * link.memory_byte;  // two are read, one is written
  const Tree tree = tree_of(members);
  const double tree_share = 1 - 1 / tree.participants;
  const double surplus = tree.surplus ? 2 * step + size * (2 * sent + reduced) : 0;
  switch (algorithm) {
    case Algorithm::kPairwise:
      if (everyone_reduces(bytes, members))
        return link.latency + others * (link.message + size * (sent + link.memory_byte));
      return 2 * (link.latency + others * link.message) + size * (2 * share * sent + share * link.memory_byte);
    case Algorithm::kHalvingDoubling:
      return 2 * tree.rounds * step + size * tree_share * (2 * sent + reduced) + surplus;
    case Algorithm::kRecursiveDoubling:
      return tree.rounds * (step + size * (sent + reduced)) + surplus;
    case Algorithm::kRing:
      return 2 * others * step + size * share * (2 * sent + reduced);
  }
  return 0;
}

Algorithm AlgorithmChoice::of_tensor(int members, size_t bytes, const LinkCost& link) const {
  if (wanted_) return *wanted_;
  if (members < kMany) return Algorithm::kPairwise;
  const Algorithm tree = of_bucket(Algorithm::kHalvingDoubling, members, bytes, link);
  const bool cheaper = allreduce_cost(tree, members, bytes, link) <
                       kClearly * allreduce_cost(Algorithm::kPairwise, members, bytes, link);
  return cheaper ? Algorithm::kHalvingDoubling : Algorithm::kPairwise;
}

Algorithm AlgorithmChoice::of_bucket(Algorithm of_tensors, int members, size_t bytes, const LinkCost& link) const {
  if (wanted_ || of_tensors != Algorithm::kHalvingDoubling) return of_tensors;
  const bool whole = allreduce_cost(Algorithm::kRecursiveDoubling, members, bytes, link) <
                     allreduce_cost(Algorithm::kHalvingDoubling, members, bytes, link);
  return whole ? Algorithm::kRecursiveDoubling : Algorithm::kHalvingDoubling;
}

}  // namespace perseus

// The messages of perseus/gradients/parameter_check.py, for programs without Python.
#include "difference.h"

#include <cinttypes>
#include <cstdio>
#include <map>

namespace perseus {
namespace {

constexpr char kRemedy[] =
    ". All ranks start from rank 0's values, so a rank has changed its own since then: give all ranks the same solver, "
    "the same net and the same Perseus.";

std::string after(int64_t steps) {
  return "[PERSEUS_PARAMETER_CHECK_N_STEPS] after " + std::to_string(steps) + " steps ";
}

// "4 on rank 1, 6 on ranks 0, 2" for the values of all ranks.
std::string by_rank(const std::vector<std::string>& values) {
  std::map<std::string, std::vector<size_t>> holders;
  for (size_t rank = 0; rank < values.size(); ++rank) holders[values[rank]].push_back(rank);
  std::string text;
  for (const auto& [value, ranks] : holders) {
    text += (text.empty() ? "" : ", ") + value + (ranks.size() == 1 ? " on rank " : " on ranks ");
    for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string hash_text(uint64_t hash) {
  char text[32];
  std::snprintf(text, sizeof text, "hash %016" PRIx64, hash);
  return text;
}

}  // namespace

std::string describe_difference(const std::vector<std::string>& names, const std::vector<uint64_t>& hashes,
                                int64_t steps) {
  const size_t count = names.size(), ranks = hashes.size() / count;
  size_t first = count, differing = 0;
  for (size_t i = count; i-- > 0;) {
    bool differs = false;
    for (size_t rank = 1; rank < ranks; ++rank) differs |= hashes[rank * count + i] != hashes[i];
    if (!differs) continue;
    first = i;
    ++differing;
  }
  std::vector<std::string> values;
  for (size_t rank = 0; rank < ranks; ++rank) values.push_back(hash_text(hashes[rank * count + first]));
  return after(steps) + "the parameter " + names[first] + " is not the same on all ranks (" + by_rank(values) +
         "); of " + std::to_string(count) + " parameters " + std::to_string(differing) +
         (differing == 1 ? " differs" : " differ") + ", this is the first" + kRemedy;
}

std::string describe_counts(const std::vector<uint64_t>& counts, int64_t steps) {
  std::vector<std::string> values;
  for (const uint64_t count : counts) values.push_back(std::to_string(count));
  return after(steps) + "the number of parameters differs: " + by_rank(values) + kRemedy;
}

}  // namespace perseus

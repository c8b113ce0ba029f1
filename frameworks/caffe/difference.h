// Describes parameters that differ between ranks. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace perseus {

// `hashes` has those of all parameters of rank 0, then those of rank 1, and so on; at least one parameter differs.
std::string describe_difference(const std::vector<std::string>& names, const std::vector<uint64_t>& hashes,
                                int64_t steps);
// The same where ranks have different numbers of parameters: `counts` by rank.
std::string describe_counts(const std::vector<uint64_t>& counts, int64_t steps);

}  // namespace perseus

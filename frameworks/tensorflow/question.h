// Numbers about the world, asked when an op runs: under elastic training they may change between steps.
#pragma once

#include <cstdint>

#include "perseus/perseus.h"

namespace perseus::tensorflow {

enum class Fact { kSize, kRank, kLocalSize, kLocalRank, kIncluded };

struct Question {
  Fact fact;
  int group;
};

inline constexpr const char* kNoGroup = "Process set provided does not exist, or has not been registered.";

// False for a group that does not exist. Any thread.
bool answer(perseus_context* context, const Question& question, int32_t* number);

}  // namespace perseus::tensorflow

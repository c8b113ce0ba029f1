// The answers are constant between two calls of init().
#include "question.h"

#include <algorithm>
#include <vector>

namespace perseus::tensorflow {
namespace {

// Of a group: its size, or this rank's place in it.
bool about_group(perseus_context* context, const Question& question, int32_t* number) {
  std::vector<int> ranks(static_cast<size_t>(perseus_context_size(context)));
  const int size = perseus_group_ranks(context, question.group, ranks.data(), static_cast<int>(ranks.size()));
  if (size < 0) return false;
  *number = size;
  if (question.fact == Fact::kSize) return true;
  const int self = perseus_context_rank(context);
  const auto place = std::find(ranks.begin(), ranks.begin() + size, self) - ranks.begin();
  *number = question.fact == Fact::kIncluded ? place < size : static_cast<int32_t>(place);
  return true;
}

}  // namespace

bool answer(perseus_context* context, const Question& question, int32_t* number) {
  switch (question.fact) {
    case Fact::kLocalSize:
      *number = perseus_context_local_size(context);
      return true;
    case Fact::kLocalRank:
      *number = perseus_context_local_rank(context);
      return true;
    default:
      return about_group(context, question, number);
  }
}

}  // namespace perseus::tensorflow

// Constant between two init(); each kernel is asked from any thread.
#include "facts.h"

#include <algorithm>
#include <string>
#include <vector>

#include "settings.h"
#include "status.h"
#include "world.h"

namespace perseus::tensorflow {
namespace {

struct Question {
  Fact fact;
  int group;
};

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

}  // namespace

void* make_fact(Fact fact, TF_OpKernelConstruction* construction) {
  int64_t group = 0;
  const OwnedStatus status;
  TF_OpKernelConstruction_GetAttrInt64(construction, "process_set_id", &group, status.get());
  if (!status.ok()) TF_OpKernelConstruction_Failure(construction, status.get());
  return new Question{fact, static_cast<int>(group)};
}

void compute_fact(void* fact, TF_OpKernelContext* context) {
  const WorldUse world;
  const OwnedStatus status;
  int32_t number = 0;
  if (world.context() == nullptr) {
    TF_SetStatus(status.get(), TF_FAILED_PRECONDITION, kNotInitialized);
  } else if (!answer(world.context(), *static_cast<const Question*>(fact), &number)) {
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, "Process set provided does not exist, or has not been registered.");
  } else {
    TF_Tensor* output = TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(number), status.get());
    if (status.ok()) *static_cast<int32_t*>(TF_TensorData(output)) = number;
    if (output != nullptr) TF_DeleteTensor(output);
  }
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
}

void destroy_fact(void* fact) { delete static_cast<Question*>(fact); }

}  // namespace perseus::tensorflow

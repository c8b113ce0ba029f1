// Each kernel is asked from any thread.
#include "facts.h"

#include "../world/world.h"
#include "status.h"

namespace perseus::tensorflow {

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
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, kNoGroup);
  } else {
    TF_Tensor* output = TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(number), status.get());
    if (status.ok()) *static_cast<int32_t*>(TF_TensorData(output)) = number;
    if (output != nullptr) TF_DeleteTensor(output);
  }
  if (!status.ok()) TF_OpKernelContext_Failure(context, status.get());
}

void destroy_fact(void* fact) { delete static_cast<Question*>(fact); }

}  // namespace perseus::tensorflow

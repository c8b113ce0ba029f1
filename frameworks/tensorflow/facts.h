// Ops that return a number about the world when they run; see question.h.
#pragma once

#include "question.h"
#include "tf_c_api.h"

namespace perseus::tensorflow {

void* make_fact(Fact fact, TF_OpKernelConstruction* construction);
template <Fact fact>
void* create_fact(TF_OpKernelConstruction* construction) {
  return make_fact(fact, construction);
}
void compute_fact(void* fact, TF_OpKernelContext* context);
void destroy_fact(void* fact);

}  // namespace perseus::tensorflow

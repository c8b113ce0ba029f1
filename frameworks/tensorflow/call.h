// One run of a collective op: from TensorFlow's tensors to the core's request and back, without copies where possible.
#pragma once

#include "completion.h"
#include "settings.h"
#include "tf_c_api.h"

namespace perseus::tensorflow {

// Starts it. `done` runs once, later and on another thread, or before this returns. Any thread.
void start_call(const Settings& settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);

}  // namespace perseus::tensorflow

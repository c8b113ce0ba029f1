// TensorFlow's "this op is done", kept beyond the call that brought it. Thread-safe.
#pragma once

#include <functional>

#include "tf_c_api.h"

namespace perseus::tensorflow {

// What the pointer that an asynchronous kernel is given is.
enum class Convention {
  kBorrowed = 0,  // TensorFlow before 2.22: a std::function<void()> on the caller's stack
  kOwned = 1,     // from 2.22 on: an object that running it deletes
};

// By the version of TensorFlow, once, before the first op runs.
void set_convention(Convention convention);

// Why the pointer is not what the convention says, null when it is; found out once per process, by where it points.
// Only within the call that brought the pointer.
const char* convention_doubt(const TF_AsyncOpKernelDoneCallback* done);

class Completion {
 public:
  // Within the call that brought the pointer.
  explicit Completion(TF_AsyncOpKernelDoneCallback* done);
  // Once. The op's context is gone afterwards.
  void run();

 private:
  std::function<void()> borrowed_;
  TF_AsyncOpKernelDoneCallback* owned_ = nullptr;
};

}  // namespace perseus::tensorflow

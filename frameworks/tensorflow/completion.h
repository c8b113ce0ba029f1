// TensorFlow's completion of an op, kept beyond the call that passed it. Thread-safe.
#pragma once

#include <functional>

#include "tf_c_api.h"

namespace perseus::tensorflow {

// The meaning of the pointer that an asynchronous kernel gets.
enum class Convention {
  kBorrowed = 0,  // TensorFlow before 2.22: a std::function<void()> on the caller's stack
  kOwned = 1,     // from 2.22 on: an object that running it deletes
};

// Called once, before the first op runs, according to TensorFlow's version.
void set_convention(Convention convention);

// The reason why the pointer does not follow the convention; null if it does. Found once per process, from the address.
// Only within the call that passed the pointer.
const char* convention_doubt(const TF_AsyncOpKernelDoneCallback* done);

class Completion {
 public:
  // Within the call that passed the pointer.
  explicit Completion(TF_AsyncOpKernelDoneCallback* done);
  // Once. The op's context is gone afterwards.
  void run();

 private:
  std::function<void()> borrowed_;
  TF_AsyncOpKernelDoneCallback* owned_ = nullptr;
};

}  // namespace perseus::tensorflow

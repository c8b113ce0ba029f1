// The two meanings of the pointer, and how they are told apart.
#include "completion.h"

#include <pthread.h>

#include <atomic>
#include <utility>

namespace perseus::tensorflow {
namespace {

std::atomic<Convention> convention{Convention::kBorrowed};

bool on_this_stack(const void* pointer) {
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return false;
  void* lowest = nullptr;
  size_t size = 0;
  pthread_attr_getstack(&attributes, &lowest, &size);
  pthread_attr_destroy(&attributes);
  const auto* begin = static_cast<const char*>(lowest);
  const auto* place = static_cast<const char*>(pointer);
  return place >= begin && place < begin + size;
}

}  // namespace

void set_convention(Convention given) { convention = given; }

const char* convention_doubt(const TF_AsyncOpKernelDoneCallback* done) {
  static const bool right = on_this_stack(done) == (convention == Convention::kBorrowed);
  if (right) return nullptr;
  return "[tensorflow] self-test failed: this TensorFlow hands completions of asynchronous kernels over in a way that "
         "Perseus does not know. Use a TensorFlow from 2.15 to 2.22, or a newer Perseus.";
}

Completion::Completion(TF_AsyncOpKernelDoneCallback* done) {
  // Nothing of the caller's uses its function after the call, so it can be moved, which allocates nothing.
  if (convention == Convention::kBorrowed) borrowed_ = std::move(*reinterpret_cast<std::function<void()>*>(done));
  else owned_ = done;
}

void Completion::run() {
  if (owned_ != nullptr) TF_RunAsyncOpKernelDoneCallback(owned_);
  else borrowed_();
}

}  // namespace perseus::tensorflow

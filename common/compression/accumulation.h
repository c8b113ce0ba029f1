// Sums of local gradients (PERSEUS_ACCUMULATE_N_STEPS): the first N - 1 gradients of a name are added up here; the sum
// is added to the N-th, which is sent. The frameworks' gradients do not change, since scripts zero them every step.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/dtype.h"
#include "base/mutex.h"
#include "base/span.h"

namespace perseus {

class Accumulation {
 public:
  struct Tensor {
    const void* in;
    void* out;
    DType dtype;
    size_t count;
  };

  explicit Accumulation(int steps) : steps_(steps) {}

  bool on() const { return steps_ > 1; }
  // Takes one step's gradient of `name` (several tensors for a grouped one), which belongs to an optimizer and a group.
  // True: it was added, and the caller is done. False: it was the last one, and every tensor's `out` has the sum of
  // all, which is no longer kept here. Throws Error(kInvalidArgument) when tensors differ from those of the steps
  // before, or when two threads bring the same gradient at once.
  bool hold(uint64_t owner, int group, const char* name, const std::vector<Tensor>& tensors);
  // Drops an optimizer's sums.
  void forget(uint64_t owner);
  // Drops those of a group, whose ranks have taken different numbers of steps.
  void forget_group(int group);
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Sum {
    ~Sum();
    uint64_t owner = 0;
    int group = 0;
    std::vector<std::pair<DType, size_t>> layout;  // dtype and elements of every tensor
    std::unique_ptr<Byte[]> data;                  // of all tensors, each on a cache line
    size_t size = 0;
    int taken = 0;
    bool busy = false;  // guarded by Accumulation::mutex_; whoever set it has the rest to itself
    std::atomic<size_t>* bytes = nullptr;
  };

  std::shared_ptr<Sum> take(uint64_t owner, int group, const char* name);
  void lay_out(Sum* sum, const char* name, const std::vector<Tensor>& tensors);

  const int steps_;
  std::atomic<size_t> bytes_{0};
  Mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Sum>> sums_ PERSEUS_GUARDED_BY(mutex_);
  std::string key_ PERSEUS_GUARDED_BY(mutex_);  // keeps its capacity
};

}  // namespace perseus

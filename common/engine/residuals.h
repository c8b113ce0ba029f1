// What lossy codecs have held back, by owner, group and name (error feedback). `take` and `forget` are for any thread;
// a record's content belongs to the operation under way, of which a name has one at most.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace perseus {

class Residuals {
 public:
  struct Record {
    ~Record();
    // Of tensor i's elements; pages that no codec touches take no memory.
    float* sent(size_t i) const { return memory.get() + begins[i]; }
    float* result(size_t i) const { return memory.get() + begins[i] + begins.back(); }

    struct Free {
      void operator()(float* p) const { std::free(p); }
    };
    uint64_t owner = 0;
    std::vector<size_t> begins;  // of the tensors, and their end
    std::unique_ptr<float[], Free> memory;
    uint64_t steps = 0;  // times it was taken
    std::atomic<size_t>* bytes = nullptr;
  };

  // Zeros at first, and again when the sizes (in elements) have changed.
  std::shared_ptr<Record> take(uint64_t owner, int group, const std::string& name, const std::vector<size_t>& sizes);
  // Drops what an owner has here.
  void forget(uint64_t owner);
  size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::atomic<size_t> bytes_{0};
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Record>> records_;  // guarded by mutex_, as is key_
  std::string key_;                                                   // keeps its capacity
};

}  // namespace perseus

// Handles: what a caller holds of a request. Looked up without locks by any thread; completed by the holder of the
// progress lock only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "request/request.h"

namespace perseus {

class HandleTable {
 public:
  struct Slot {
    // Generation of the handle it serves, kOpen while that is not released, kDone. Release in complete() pairs with
    // acquire in is_done(): whoever sees the bit sees status, outputs and the tensors' bytes.
    std::atomic<uint64_t> state{0};
    Status status;                                         // valid once done
    GradientOutcome gradient = GradientOutcome::kReduced;  // likewise
    std::vector<Output> outputs;                           // likewise
    std::unique_ptr<cuda::Staging> staging;                // likewise; of tensors on a device
    // A caller waits, or asks whether it is done. Release by the caller pairs with acquire by the holder of the
    // progress lock, which then sees what the caller has submitted.
    std::atomic<bool> awaited{false};
  };

  HandleTable() = default;
  ~HandleTable();
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  // A new handle (> 0), in progress.
  int64_t open();
  // Null when never opened, or released.
  Slot* find(int64_t handle) const;
  static bool is_done(const Slot& slot) { return (slot.state.load(std::memory_order_acquire) & kDone) != 0; }
  // The handle is done, or another thread has released it since it was found: there is nothing to wait for.
  static bool is_over(const Slot& slot, int64_t handle) {
    return slot.state.load(std::memory_order_acquire) != (generation_of(handle) << kFlags | kOpen);
  }
  // By the holder of the progress lock, after which the slot belongs to the caller; also by a submitter that fails.
  static void complete(Slot* slot) { slot->state.fetch_or(kDone, std::memory_order_release); }
  Slot* at(uint32_t index) const { return &blocks_[index / kBlock].load(std::memory_order_acquire)[index % kBlock]; }
  static int64_t handle_of(const Slot& slot, uint32_t index) {
    return static_cast<int64_t>((slot.state.load(std::memory_order_relaxed) >> kFlags) * kCapacity + index);
  }
  static uint32_t index_of(int64_t handle) { return static_cast<uint32_t>(handle & (kCapacity - 1)); }
  // The outcome of a handle that is done; none when it is unknown or in progress. Another thread may release it.
  std::optional<Status> outcome(int64_t handle);
  // Hands over the memory of an output, once; null when the handle has none or is not done.
  void* take_output(int64_t handle, int index);
  // Forgets a handle that is done; false when it is in progress or unknown, and for all but one of several threads.
  bool release(int64_t handle);

 private:
  static constexpr uint32_t kBlock = 1024, kBlocks = 4096, kCapacity = kBlock * kBlocks;
  static constexpr uint64_t kDone = 1, kOpen = 2;
  static constexpr int kFlags = 2;  // bits below the generation

  static uint64_t generation_of(int64_t handle) { return static_cast<uint64_t>(handle) / kCapacity; }
  Slot* find_done(int64_t handle) const;

  std::atomic<Slot*> blocks_[kBlocks] = {};
  Mutex mutex_;  // also keeps a done slot's fields from the thread that releases it
  std::vector<uint32_t> free_ PERSEUS_GUARDED_BY(mutex_);
  uint32_t size_ PERSEUS_GUARDED_BY(mutex_) = 0;
};

}  // namespace perseus

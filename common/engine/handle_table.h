// Handles: what a caller holds of a request. Looked up without locks by any thread; completed by the driver only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "engine/request.h"

namespace perseus {

class HandleTable {
 public:
  struct Slot {
    // Generation of the handle it serves, shifted left by one; the lowest bit says done. Release by the driver pairs
    // with acquire in is_done(): whoever sees the bit sees status, outputs and the tensors' bytes.
    std::atomic<uint64_t> state{0};
    Status status;                                         // valid once done
    GradientOutcome gradient = GradientOutcome::kReduced;  // likewise
    std::vector<Output> outputs;                           // likewise
    // A caller waits, or asks whether it is done. Release by the caller pairs with acquire by the driver, which then
    // sees what the caller has submitted.
    std::atomic<bool> awaited{false};
  };

  HandleTable() = default;
  ~HandleTable();
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  // A new handle (> 0), in progress.
  int64_t open();
  // Null when unknown or released.
  Slot* find(int64_t handle) const;
  static bool is_done(const Slot& slot) { return (slot.state.load(std::memory_order_acquire) & 1) != 0; }
  // By the driver, after which the slot belongs to the caller.
  static void complete(Slot* slot) { slot->state.fetch_or(1, std::memory_order_release); }
  Slot* at(uint32_t index) const { return &blocks_[index / kBlock].load(std::memory_order_acquire)[index % kBlock]; }
  static int64_t handle_of(const Slot& slot, uint32_t index) {
    return static_cast<int64_t>((slot.state.load(std::memory_order_relaxed) >> 1) * kCapacity + index);
  }
  static uint32_t index_of(int64_t handle) { return static_cast<uint32_t>(handle & (kCapacity - 1)); }
  // Forgets a handle that is done; false when it is in progress or unknown.
  bool release(int64_t handle);

 private:
  static constexpr uint32_t kBlock = 1024, kBlocks = 4096, kCapacity = kBlock * kBlocks;

  std::atomic<Slot*> blocks_[kBlocks] = {};
  std::mutex mutex_;
  std::vector<uint32_t> free_;  // guarded by mutex_, as is size_
  uint32_t size_ = 0;
};

}  // namespace perseus

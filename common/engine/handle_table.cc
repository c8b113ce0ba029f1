// Blocks of slots that never move, and a free list.
#include "engine/handle_table.h"

#include <cstdlib>

namespace perseus {

HandleTable::~HandleTable() {
  for (auto& block : blocks_) {
    Slot* slots = block.load(std::memory_order_relaxed);
    if (slots == nullptr) continue;
    for (uint32_t i = 0; i < kBlock; ++i)
      for (Output& output : slots[i].outputs) std::free(output.data);
    delete[] slots;
  }
}

int64_t HandleTable::open() {
  std::lock_guard<std::mutex> lock(mutex_);
  uint32_t index;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else {
    if (size_ == kCapacity)
      fail(ErrorKind::kInvalidArgument, "[engine] four million handles are open: synchronize() what was started");
    if (size_ % kBlock == 0) blocks_[size_ / kBlock].store(new Slot[kBlock], std::memory_order_release);
    index = size_++;
  }
  Slot* slot = at(index);
  const uint64_t generation = (slot->state.load(std::memory_order_relaxed) >> 1) + 1;
  slot->awaited.store(false, std::memory_order_relaxed);
  slot->state.store(generation << 1, std::memory_order_release);
  return static_cast<int64_t>(generation * kCapacity + index);
}

HandleTable::Slot* HandleTable::find(int64_t handle) const {
  if (handle <= 0) return nullptr;
  const uint32_t index = index_of(handle);
  if (blocks_[index / kBlock].load(std::memory_order_acquire) == nullptr) return nullptr;
  Slot* slot = at(index);
  const uint64_t generation = static_cast<uint64_t>(handle) / kCapacity;
  return slot->state.load(std::memory_order_acquire) >> 1 == generation ? slot : nullptr;
}

bool HandleTable::release(int64_t handle) {
  Slot* slot = find(handle);
  if (slot == nullptr || !is_done(*slot)) return false;
  for (Output& output : slot->outputs) std::free(output.data);
  slot->outputs.clear();
  slot->status = Status();
  slot->gradient = GradientOutcome::kReduced;
  std::lock_guard<std::mutex> lock(mutex_);
  // The next generation's first value: stale handles find nothing.
  slot->state.store(((slot->state.load(std::memory_order_relaxed) >> 1) + 1) << 1, std::memory_order_release);
  free_.push_back(HandleTable::index_of(handle));
  return true;
}

}  // namespace perseus

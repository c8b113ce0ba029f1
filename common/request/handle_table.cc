// Blocks of slots that never move, and a free list.
#include "request/handle_table.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

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
  const MutexLock lock(mutex_);
  uint32_t index;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else {
    if (size_ == kCapacity)
      fail(ErrorKind::kInvalidArgument, "[engine] four million handles are open: synchronize() what was started");
    if (size_ % kBlock == 0) free_.reserve(size_ + kBlock);  // giving one back must not fail
    if (size_ % kBlock == 0) blocks_[size_ / kBlock].store(new Slot[kBlock], std::memory_order_release);
    index = size_++;
  }
  Slot* slot = at(index);
  const uint64_t generation = (slot->state.load(std::memory_order_relaxed) >> kFlags) + 1;
  slot->awaited.store(false, std::memory_order_relaxed);
  slot->state.store(generation << kFlags | kOpen, std::memory_order_release);
  return static_cast<int64_t>(generation * kCapacity + index);
}

HandleTable::Slot* HandleTable::find(int64_t handle) const {
  if (handle <= 0) return nullptr;
  const uint32_t index = index_of(handle);
  if (blocks_[index / kBlock].load(std::memory_order_acquire) == nullptr) return nullptr;
  Slot* slot = at(index);
  const uint64_t state = slot->state.load(std::memory_order_acquire);
  return (state & kOpen) != 0 && state >> kFlags == generation_of(handle) ? slot : nullptr;
}

HandleTable::Slot* HandleTable::find_done(int64_t handle) const {
  Slot* slot = find(handle);
  return slot != nullptr && is_done(*slot) ? slot : nullptr;
}

std::optional<Status> HandleTable::outcome(int64_t handle) {
  const MutexLock lock(mutex_);
  const Slot* slot = find_done(handle);
  return slot == nullptr ? std::nullopt : std::optional<Status>(slot->status);
}

void* HandleTable::take_output(int64_t handle, int index) {
  const MutexLock lock(mutex_);
  Slot* slot = find_done(handle);
  if (slot == nullptr || index < 0 || index >= static_cast<int>(slot->outputs.size())) return nullptr;
  return std::exchange(slot->outputs[static_cast<size_t>(index)].data, nullptr);
}

bool HandleTable::release(int64_t handle) {
  std::vector<Output> unclaimed;  // freed without the lock: large memory goes back to the system
  std::unique_ptr<cuda::Staging> staging;
  {
    const MutexLock lock(mutex_);
    Slot* slot = find_done(handle);
    if (slot == nullptr) return false;
    const auto held = [](const Output& output) { return output.data != nullptr; };
    if (std::any_of(slot->outputs.begin(), slot->outputs.end(), held)) unclaimed.swap(slot->outputs);
    slot->outputs.clear();
    staging.swap(slot->staging);
    slot->status = Status();
    slot->gradient = GradientOutcome::kReduced;
    // Neither this handle nor the slot's next one, which has not been opened yet, finds anything.
    slot->state.store(generation_of(handle) << kFlags, std::memory_order_release);
    free_.push_back(index_of(handle));
  }
  for (Output& output : unclaimed) std::free(output.data);
  return true;
}

}  // namespace perseus

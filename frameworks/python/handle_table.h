// Open handles by number: an open-addressed table for numbers that are issued in sequence and released soon.
// Needs the GIL (one thread at a time).
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "perseus/perseus.h"
#include "tensor_view.h"

namespace perseus::python {

// An operation between its submission and its synchronisation. The references keep its memory alive.
struct Pending {
  int64_t number = 0;          // 0 = a free slot
  perseus_handle handle = 0;   // of the core; 0 once the outcome is known
  PyObject* input = nullptr;   // a tensor, or a sequence of them, or NULL (barrier, groups)
  PyObject* result = nullptr;  // what synchronize returns; NULL where the core owns the output
  PyObject* error = nullptr;   // the outcome when that was a failure
  uint64_t gradient_of = 0;    // see perseus_request
  bool with_splits = false;    // alltoall whose caller wants the received splits
  perseus_kind kind = PERSEUS_ALLREDUCE;
  int device = kHost;  // where its tensors are; then the stream that computed them, and how to learn of another
  void* stream = nullptr;
  CurrentStream current_stream = nullptr;
};

class HandleTable {
 public:
  HandleTable() : slots_(kInitialSlots) {}

  // Both pointers are valid until the next insert or erase.
  Pending* find(int64_t number) {
    for (size_t i = home(number); slots_[i].number != 0; i = next(i))
      if (slots_[i].number == number) return &slots_[i];
    return nullptr;
  }
  void insert(const Pending& pending) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    place(pending);
    ++count_;
  }
  // Does not release references.
  void erase(int64_t number) {
    size_t hole = home(number);
    while (slots_[hole].number != number) {
      if (slots_[hole].number == 0) return;
      hole = next(hole);
    }
    --count_;
    // Later entries of the same run move up, so that no search ends at the hole.
    for (size_t i = next(hole); slots_[i].number != 0; i = next(i)) {
      const size_t distance = (i - home(slots_[i].number)) & (slots_.size() - 1);
      if (distance < ((i - hole) & (slots_.size() - 1))) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole] = Pending{};
  }
  size_t size() const { return count_; }
  std::vector<int64_t> numbers() const {
    std::vector<int64_t> found;
    for (const Pending& pending : slots_)
      if (pending.number != 0) found.push_back(pending.number);
    return found;
  }

 private:
  static constexpr size_t kInitialSlots = 1024;  // a power of two

  size_t home(int64_t number) const { return static_cast<size_t>(number) & (slots_.size() - 1); }
  size_t next(size_t i) const { return (i + 1) & (slots_.size() - 1); }
  void place(const Pending& pending) {
    size_t i = home(pending.number);
    while (slots_[i].number != 0) i = next(i);
    slots_[i] = pending;
  }
  void grow() {
    std::vector<Pending> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Pending& pending : old)
      if (pending.number != 0) place(pending);
  }

  std::vector<Pending> slots_;
  size_t count_ = 0;
};

}  // namespace perseus::python

// Tensors of other floating types as float32 while they are reduced: floats of them before, themselves again at the
// end, rounded once.
#pragma once

#include <vector>

#include "base/dtype.h"
#include "base/progress_lock.h"
#include "collective/exchange_plan.h"

namespace perseus {

class FloatStaging {
 public:
  // Begins anew, for tensors of this type.
  void start(DType dtype) PERSEUS_REQUIRES(progress_lock);
  bool needed() const PERSEUS_REQUIRES(progress_lock) { return dtype_ != DType::kFloat32; }

  // A piece of a tensor; it gets a place among the floats.
  void add(const Piece& piece) PERSEUS_REQUIRES(progress_lock);
  // Converts all inputs into `memory`, which stays until store(). Values beyond float32's become infinite.
  void load(std::vector<float>* memory) PERSEUS_REQUIRES(progress_lock);
  // The floats of the piece that was added as number i: to be reduced in place. After load().
  Piece floats(size_t i) const PERSEUS_REQUIRES(progress_lock);
  // Converts the floats to the outputs.
  void store() const PERSEUS_REQUIRES(progress_lock);

 private:
  struct Part {
    Piece piece;
    size_t begin, count;  // elements
  };

  DType dtype_ = DType::kFloat32;
  std::vector<Part> parts_;
  float* memory_ = nullptr;
};

}  // namespace perseus

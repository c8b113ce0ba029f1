// Conversions there and back.
#include "collective/float_staging.h"

#include "kernels/codec_kernels.h"
#include "kernels/float_mode.h"

namespace perseus {

void FloatStaging::start(DType dtype) {
  dtype_ = dtype;
  parts_.clear();
  memory_ = nullptr;
}

void FloatStaging::add(const Piece& piece) {
  const size_t begin = parts_.empty() ? 0 : parts_.back().begin + parts_.back().count;
  parts_.push_back({piece, begin, piece.bytes / dtype_size(dtype_)});
}

void FloatStaging::load(std::vector<float>* memory) {
  const size_t total = parts_.empty() ? 0 : parts_.back().begin + parts_.back().count;
  if (memory->size() < total) memory->resize(total);
  memory_ = memory->data();
  const kernels::DefaultFloatMode mode;
  for (const Part& part : parts_) {
    float* const to = memory_ + part.begin;
    if (dtype_ == DType::kFloat64) {
      const auto* from = reinterpret_cast<const double*>(part.piece.in);
      for (size_t i = 0; i < part.count; ++i) to[i] = static_cast<float>(from[i]);
    } else {
      kernels::decode_halves(dtype_, part.piece.in, 1.0F, part.count, to, kernels::Arrival::kStore);
    }
  }
}

Piece FloatStaging::floats(size_t i) const {
  const Part& part = parts_[i];
  Byte* const floats = reinterpret_cast<Byte*>(memory_ + part.begin);
  return {floats, floats, part.count * sizeof(float)};
}

void FloatStaging::store() const {
  const kernels::DefaultFloatMode mode;
  for (const Part& part : parts_) {
    const float* const from = memory_ + part.begin;
    if (dtype_ == DType::kFloat64) {
      auto* to = reinterpret_cast<double*>(part.piece.out);
      for (size_t i = 0; i < part.count; ++i) to[i] = static_cast<double>(from[i]);
    } else {
      kernels::encode_halves(dtype_, from, 1.0F, 1.0F, part.count, part.piece.out, nullptr);
    }
  }
}

}  // namespace perseus

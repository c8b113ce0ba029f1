// A request's terms of compression, which must be equal on all its ranks. Plain values.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/fields.h"
#include "codec/codec.h"

namespace perseus {

struct CompressionTerms {
  CodecSpec codec;              // of sums of floating type between inner groups
  bool automatic = false;       // or a more accurate one, chosen by the group's measurements
  bool inside = false;          // inside groups as PERSEUS_ALLREDUCE_DTYPE says, not exact
  bool doubles = false;         // float64 tensors, too
  uint64_t from = 0;            // bytes: smaller tensors are sent as the settings say
  double momentum = 0;          // of the optimizer, by which top-k corrects what it holds back; 0 = it does not
  bool masks_momentum = false;  // that of what is sent begins anew

  // Does the codec compress tensors of this type?
  bool serves(DType dtype) const {
    if (automatic) return dtype == DType::kFloat32;
    return dtype_is_float(dtype) && (doubles || dtype != DType::kFloat64);
  }

  // Is what this codec holds back corrected by the optimizer's momentum?
  bool corrects(CodecKind kind) const { return kind == CodecKind::kTopK && momentum != 0; }

  static constexpr auto fields() {
    return std::make_tuple(field("codec", &CompressionTerms::codec), field("automatic", &CompressionTerms::automatic),
                           field("inside", &CompressionTerms::inside), field("doubles", &CompressionTerms::doubles),
                           field("from", &CompressionTerms::from), field("momentum", &CompressionTerms::momentum),
                           field("masks_momentum", &CompressionTerms::masks_momentum));
  }
};
inline bool operator==(const CompressionTerms& a, const CompressionTerms& b) { return same_fields(a, b); }

}  // namespace perseus

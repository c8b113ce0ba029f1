// Codecs, sizes and values that the tests of codecs go through, and one chunk's way over the wire.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "codec/codec.h"

namespace perseus_test {

using perseus::Byte;
using perseus::CodecKind;
using perseus::CodecSpec;
using perseus::WireFormat;

inline CodecSpec spec_of(CodecKind kind) {
  CodecSpec spec;
  spec.kind = kind;
  return spec;
}
inline CodecSpec scaled_half(double scale) {
  CodecSpec spec = spec_of(CodecKind::kFloat16);
  spec.scale = scale;
  return spec;
}
inline CodecSpec top_k(double ratio, bool half_values) {
  CodecSpec spec = spec_of(CodecKind::kTopK);
  spec.ratio = ratio;
  spec.half_values = half_values;
  return spec;
}
inline CodecSpec lossless(bool narrow) {
  CodecSpec spec = spec_of(CodecKind::kLossless);
  spec.half_values = narrow;
  return spec;
}
inline CodecSpec rotate(int every, double momentum) {
  CodecSpec spec = spec_of(CodecKind::kRotate);
  spec.every = every;
  spec.momentum = momentum;
  return spec;
}

inline std::vector<CodecSpec> all_codecs() {
  return {spec_of(CodecKind::kFloat16),
          scaled_half(64),
          spec_of(CodecKind::kBFloat16),
          spec_of(CodecKind::kInt8),
          spec_of(CodecKind::kInt4),
          spec_of(CodecKind::kInt2),
          top_k(0.01, false),
          top_k(0.01, true),
          top_k(0.1, false),
          top_k(0.3, true),
          top_k(1.0, false),
          rotate(1, 1.0),
          rotate(3, 1.0),
          rotate(8, 0.5),
          rotate(100000, 1.0),
          lossless(false),
          lossless(true)};
}

constexpr size_t kCodecSizes[] = {1, 2, 15, 16, 255, 256, 257, 1000, 16384};

// What a chunk's elements are like.
enum class Values { kNormal, kWide, kZero, kDenormal, kHuge, kSparse, kConstant };
constexpr Values kAllValues[] = {Values::kNormal, Values::kWide,   Values::kZero,    Values::kDenormal,
                                 Values::kHuge,   Values::kSparse, Values::kConstant};

inline std::vector<float> make_values(Values values, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed * 1000003 + count);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    const float sign = value < 0 ? -1.0f : 1.0f;
    if (values == Values::kNormal) x[i] = 1e-3f * value;
    if (values == Values::kWide) x[i] = std::ldexp(value, static_cast<int>(random() % 200) - 100);
    if (values == Values::kZero) x[i] = i % 2 == 0 ? 0.0f : -0.0f;
    if (values == Values::kDenormal) x[i] = std::ldexp(sign, -149) * static_cast<float>(random() % 5000);
    if (values == Values::kHuge) x[i] = sign * (i % 3 == 0 ? 3e38f : i % 3 == 1 ? 1e30f : 2.9e38f);
    if (values == Values::kSparse) x[i] = random() % 20 == 0 ? value : 0.0f;
    if (values == Values::kConstant) x[i] = -0.37f;
  }
  return x;
}

// Made once: every variant and every place of a test asks for the same ones again.
inline std::vector<float> values_of(Values values, size_t count, uint64_t seed) {
  static std::map<std::tuple<Values, size_t, uint64_t>, std::vector<float>> made;
  std::vector<float>& x = made[{values, count, seed}];
  if (x.empty()) x = make_values(values, count, seed);
  return x;
}

// The chunk's bytes, in a block of exactly their size so that AddressSanitizer sees who reads beyond.
inline std::vector<Byte> encoded(const WireFormat& codec, const std::vector<float>& x, std::vector<float>* residual,
                                 uint64_t step) {
  std::vector<uint32_t> to(codec.most_bytes(x.size()) / 4, 0xdeadbeef);
  Byte* bytes = reinterpret_cast<Byte*>(to.data());
  size_t size = codec.encode(x.data(), residual != nullptr ? residual->data() : nullptr, x.size(), step, bytes);
  return std::vector<Byte>(bytes, bytes + size);
}

inline std::vector<float> decoded(const WireFormat& codec, const std::vector<Byte>& bytes, size_t count) {
  std::vector<float> x(count, 77.0f);
  codec.decode(bytes.data(), bytes.size(), count, x.data());
  return x;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace perseus_test

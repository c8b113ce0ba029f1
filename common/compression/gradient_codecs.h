// Which codec a request gets: by the settings when it is a gradient, else as it asks itself. Immutable: thread-safe.
#pragma once

#include "base/config.h"
#include "codec/codec.h"
#include "compression/codec_choice.h"
#include "compression/terms.h"

namespace perseus {

// What a request says about it; same numbers as enum perseus_codec.
struct CodecWish {
  enum Kind : int { kSettings = 0, kExact, kFloat16, kBFloat16, kInt8, kTopK, kRotate, kAuto };
  static constexpr int kKinds = 8;
  int kind = kSettings;
  double argument = 0;  // top-k: fraction of elements, rotate: N; 0 = as the settings say
};

class GradientCodecs {
 public:
  // Throws Error(kInvalidArgument) for settings that exclude each other.
  explicit GradientCodecs(const Config& config);

  // For a request that sums or averages, or does something else. Throws Error(kInvalidArgument) for a wish that makes
  // no sense.
  CompressionTerms choose(bool sums, bool gradient, const CodecWish& wish) const;
  // What gradients get that are too small for another codec, and all of them inside a host where that is asked for.
  const CodecSpec& precision() const { return precision_; }
  // What auto chooses among, ordered as kAutoKinds, and the least bytes for the last one.
  std::array<CodecSpec, kAutoCodecs> auto_codecs() const;
  uint64_t sparse_from() const { return sparse_from_; }
  // What to tell a user who has chosen nothing; "" for one who has. `between_hosts`: else between groups of a host.
  std::string news(bool between_hosts) const;

 private:
  CompressionTerms automatic() const;
  CodecSpec spec(CodecWish::Kind kind, double argument) const;

  CodecSpec defaults_;   // arguments of every codec
  CodecSpec precision_;  // float16 or none
  CodecSpec gradient_;
  bool auto_ = false;    // for gradients, by the settings
  bool chosen_ = false;  // PERSEUS_ALLREDUCE_DTYPE is set
  bool inside_ = false;
  uint64_t from_ = 0;
  uint64_t sparse_from_ = 0;  // bytes
};

}  // namespace perseus

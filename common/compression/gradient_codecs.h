// Chooses a request's codec: by the settings if it is a gradient, else by the request. Immutable and so thread-safe.
#pragma once

#include "base/config.h"
#include "codec/codec.h"
#include "compression/codec_choice.h"
#include "compression/terms.h"

namespace perseus {

// A request's wish; same numbers as enum perseus_codec.
struct CodecWish {
  enum Kind : int {
    kSettings = 0,
    kExact,
    kFloat16,
    kBFloat16,
    kInt8,
    kTopK,
    kRotate,
    kAuto,
    kInside,
    kLowRank,
    kLossless,
    kInt4,
    kInt2
  };
  static constexpr int kKinds = 13;
  int kind = kSettings;
  double argument = 0;  // top-k: fraction of elements, rotate, inside: N, low rank: the rank; 0 = as the settings say
};

// The wish for a codec. Both enumerations have the same order, but auto is only a wish.
CodecWish::Kind wish_for(CodecKind kind);

// May training end with a higher loss than with exact gradients? By docs/accuracy.md.
bool may_cost_accuracy(const CodecSpec& codec);
// May it so with optimizers that do not step in proportion to gradients? Adam divides by the root of their second
// moments, which grow by what few bits put off.
bool suits_only_sgd(const CodecSpec& codec);
// Does a perseus_request.learning_rate tell that the optimizer steps in proportion to gradients?
bool in_proportion(double learning_rate);

class GradientCodecs {
 public:
  // Throws Error(kInvalidArgument) for settings that exclude each other.
  explicit GradientCodecs(const Config& config);

  // `sums`: the request sums or averages. `momentum`: see perseus_request. Throws Error(kInvalidArgument) for a wish
  // that makes no sense.
  CompressionTerms choose(bool sums, bool gradient, const CodecWish& wish, double momentum) const;
  // The codec of gradients that are too small for another one, and of all gradients inside a host if the settings ask
  // for it.
  const CodecSpec& precision() const { return precision_; }
  bool precision_chosen() const { return chosen_; }  // by the user
  // The codecs that auto chooses among, ordered as kAutoKinds.
  std::array<CodecSpec, kAutoCodecs> auto_codecs() const;
  // The message for a user who has chosen no compression; "" for others. `between_hosts`: else between groups of a
  // host.
  std::string news(bool between_hosts) const;

 private:
  CompressionTerms chosen(bool sums, bool gradient, const CodecWish& wish) const;
  CompressionTerms automatic() const;
  CodecSpec spec(CodecWish::Kind kind, double argument) const;

  CodecSpec defaults_;  // arguments of every codec
  int low_rank_warm_up_ = 0;
  CodecSpec precision_;  // float16 or none
  CodecSpec gradient_;
  bool auto_ = false;    // for gradients, by the settings
  bool chosen_ = false;  // PERSEUS_ALLREDUCE_DTYPE is set
  bool inside_ = false;
  MomentumCorrection correction_ = MomentumCorrection::kNone;  // of top-k
  uint64_t from_ = 0;
  uint64_t sparse_from_ = 0;  // bytes
};

}  // namespace perseus

// From variables and wishes to codecs.
#include "compression/gradient_codecs.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "codec/top_k.h"

namespace perseus {
namespace {

CodecKind kind_of(CodecWish::Kind wish) {
  return static_cast<CodecKind>(wish - CodecWish::kExact - (wish > CodecWish::kAuto ? 1 : 0));
}

}  // namespace

CodecWish::Kind wish_for(CodecKind kind) {
  const int wish = static_cast<int>(kind) + CodecWish::kExact;
  return static_cast<CodecWish::Kind>(wish < CodecWish::kAuto ? wish : wish + 1);
}
GradientCodecs::GradientCodecs(const Config& config) {
  defaults_.ratio = config.number(Var::kTopKRatio);
  defaults_.half_values = config.flag(Var::kTopKHalf);
  defaults_.warm_up = static_cast<int>(config.integer(Var::kTopKWarmUp));
  correction_ = config.choice<MomentumCorrection>();
  low_rank_warm_up_ = static_cast<int>(config.integer(Var::kPowerSgdWarmUp));
  defaults_.every = static_cast<int>(config.integer(Var::kDownsample));
  defaults_.momentum = config.number(Var::kGradientMomentum);
  defaults_.matrix_rank = static_cast<int>(config.integer(Var::kPowerSgdRank));
  defaults_.scale = config.number(Var::kGradientScale);
  const auto precision = config.choice<AllreduceDtype>();
  if (precision != AllreduceDtype::kFull) precision_ = spec(CodecWish::kFloat16, 0);
  chosen_ = precision != AllreduceDtype::kAuto;
  const bool top_k = config.flag(Var::kTopK), rotates = config.integer(Var::kDownsample) > 1;
  const auto choice = config.choice<AllreduceCodec>();
  // Who asks for every bit does not want float16 inside a host.
  inside_ = precision == AllreduceDtype::kHalf && choice != AllreduceCodec::kLossless;
  if (top_k + rotates + (choice != AllreduceCodec::kDtype) > 1)
    fail(ErrorKind::kInvalidArgument,
         "[config] LIGHT_TOPK_ALLREDUCE, PERSEUS_DOWNSAMPLE_N_ELEMENTS and PERSEUS_ALLREDUCE_CODEC are ways to send "
         "less: set one of them");
  gradient_ = top_k                                 ? spec(CodecWish::kTopK, 0)
              : rotates                             ? spec(CodecWish::kRotate, 0)
              : choice == AllreduceCodec::kInt8     ? spec(CodecWish::kInt8, 0)
              : choice == AllreduceCodec::kInt4     ? spec(CodecWish::kInt4, 0)
              : choice == AllreduceCodec::kInt2     ? spec(CodecWish::kInt2, 0)
              : choice == AllreduceCodec::kPowerSgd ? spec(CodecWish::kLowRank, 0)
              : choice == AllreduceCodec::kLossless ? spec(CodecWish::kLossless, 0)
                                                    : precision_;
  auto_ = choice == AllreduceCodec::kAuto;
  check_codec(precision_);
  check_codec(gradient_);
  sparse_from_ = static_cast<uint64_t>(config.integer(Var::kTopKThreshold));
  if (top_k) from_ = sparse_from_;
}

// Arguments that a codec does not look at are zero, so that equal codecs compare equal.
CodecSpec GradientCodecs::spec(CodecWish::Kind kind, double argument) const {
  CodecSpec spec;
  spec.kind = kind_of(kind);
  if (kind == CodecWish::kLowRank) {
    spec.matrix_rank = argument == 0 ? defaults_.matrix_rank : static_cast<int>(argument);
    spec.warm_up = low_rank_warm_up_;
  }
  if (kind == CodecWish::kFloat16) spec.scale = defaults_.scale;
  if (kind == CodecWish::kTopK) {
    spec.ratio = argument == 0 ? defaults_.ratio : argument;
    spec.half_values = defaults_.half_values;
    if (spec.ratio < TopKFormat::kWarmUpBelow) spec.warm_up = defaults_.warm_up;
  }
  if (kind == CodecWish::kRotate) {
    spec.every = argument == 0 ? defaults_.every : static_cast<int>(argument);
    spec.momentum = defaults_.momentum;
  }
  if (kind == CodecWish::kInside && argument > 0) spec.every = static_cast<int>(argument);
  return spec;
}

std::array<CodecSpec, kAutoCodecs> GradientCodecs::auto_codecs() const {
  std::array<CodecSpec, kAutoCodecs> specs;
  for (size_t i = 0; i < specs.size(); ++i) specs[i] = spec(wish_for(kAutoKinds[i]), 0);
  return specs;
}

std::string GradientCodecs::news(bool between_hosts) const {
  if (chosen_ || auto_ || gradient_.kind != CodecKind::kFloat16) return "";
  return std::string("[codec] float32 gradients travel as float16 between ") +
         (between_hosts ? "hosts" : "groups of LIGHT_INTRA_SIZE ranks") +
         ": PERSEUS_ALLREDUCE_DTYPE=1 keeps full precision, PERSEUS_ALLREDUCE_DTYPE=2 keeps this without a word";
}

bool may_cost_accuracy(const CodecSpec& codec) {
  return (codec.kind == CodecKind::kTopK && codec.ratio < 1) || codec.kind == CodecKind::kLowRank ||
         (codec.kind == CodecKind::kInside && codec.every > 1);
}

bool suits_only_sgd(const CodecSpec& codec) { return codec.kind == CodecKind::kInt4 || codec.kind == CodecKind::kInt2; }

bool in_proportion(double learning_rate) { return learning_rate > 0 && std::isfinite(learning_rate); }

// The group chooses; `codec` is the one that leaves out most of what it may choose.
CompressionTerms GradientCodecs::automatic() const {
  const auto specs = auto_codecs();
  for (const CodecSpec& spec : specs) check_codec(spec);
  CompressionTerms terms;
  terms.automatic = true;
  terms.codec = specs.back();
  return terms;
}

CompressionTerms GradientCodecs::choose(bool sums, bool gradient, const CodecWish& wish, double momentum) const {
  CompressionTerms terms = chosen(sums, gradient, wish);
  // With float16 inside hosts, ranks get results that others have encoded, and know nothing of momentum.
  const bool can = gradient && terms.codec.kind == CodecKind::kTopK && !terms.inside && momentum > 0 && momentum < 1;
  if (!can || correction_ == MomentumCorrection::kNone) return terms;
  terms.momentum = momentum;
  terms.masks_momentum = correction_ == MomentumCorrection::kMasking;
  return terms;
}

CompressionTerms GradientCodecs::chosen(bool sums, bool gradient, const CodecWish& wish) const {
  CompressionTerms terms;
  if (!sums) {
    if (wish.kind > CodecWish::kExact)
      fail(ErrorKind::kInvalidArgument, "[engine] compression is for sums and averages: use op=Sum or op=Average");
    return terms;
  }
  if (wish.kind < 0 || wish.kind >= CodecWish::kKinds)
    fail(ErrorKind::kInvalidArgument, "[engine] unknown codec " + std::to_string(wish.kind));
  if (wish.kind == CodecWish::kSettings) {
    if (!gradient) return terms;
    if (auto_) return automatic();
    terms.codec = gradient_;
    terms.inside = inside_;
    terms.from = from_;
    return terms;
  }
  if (wish.kind == CodecWish::kAuto) return automatic();
  const bool whole = wish.argument >= 0 && wish.argument <= 1024 && wish.argument == static_cast<int>(wish.argument);
  if ((wish.kind == CodecWish::kRotate || wish.kind == CodecWish::kInside) && !whole)
    fail(ErrorKind::kInvalidArgument,
         "[engine] one N-th is sent in each step: expected a whole number N of 1 to 1024, got " +
             std::to_string(wish.argument));
  if (wish.kind == CodecWish::kLowRank && !whole)
    fail(ErrorKind::kInvalidArgument,
         "[engine] the rank of PowerSGD's matrices: expected a whole number of 1 to 1024, got " +
             std::to_string(wish.argument));
  terms.codec = spec(static_cast<CodecWish::Kind>(wish.kind), wish.argument);
  check_codec(terms.codec);
  // A caller that has float64 wants precision, unless it asks for a codec itself.
  terms.doubles = wish.kind != CodecWish::kExact;
  if (wish.kind == CodecWish::kTopK) terms.from = std::min(sparse_from_, uint64_t{TopKFormat::kSmallTensor});
  return terms;
}

}  // namespace perseus

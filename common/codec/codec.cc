// The table of codecs, and the rules for what may be asked of them. Thread-safe.
#include "codec/codec.h"

#include <sstream>

#include "base/error.h"
#include "codec/half.h"
#include "codec/integers.h"
#include "codec/lossless.h"
#include "codec/rotating.h"
#include "codec/top_k.h"

namespace perseus {
namespace {

struct Entry {
  const char* name;
  std::unique_ptr<WireFormat> (*make)(const CodecSpec& spec);
};

// Ordered as CodecKind is.
constexpr Entry kCodecs[] = {
    {"none", [](const CodecSpec&) { return std::unique_ptr<WireFormat>(); }},
    {"float16",
     [](const CodecSpec& spec) -> std::unique_ptr<WireFormat> {
       return std::make_unique<HalfFormat>(DType::kFloat16, spec.scale);
     }},
    {"bfloat16",
     [](const CodecSpec&) -> std::unique_ptr<WireFormat> { return std::make_unique<HalfFormat>(DType::kBFloat16); }},
    {"int8", [](const CodecSpec&) -> std::unique_ptr<WireFormat> { return std::make_unique<IntegerFormat>(8); }},
    {"top-k",
     [](const CodecSpec& spec) -> std::unique_ptr<WireFormat> {
       return std::make_unique<TopKFormat>(spec.ratio, spec.half_values, spec.warm_up);
     }},
    {"rotate",
     [](const CodecSpec& spec) -> std::unique_ptr<WireFormat> {
       return std::make_unique<RotatingFormat>(spec.every, spec.momentum);
     }},
    {"inside hosts only", [](const CodecSpec&) { return std::unique_ptr<WireFormat>(); }},
    {"PowerSGD", [](const CodecSpec&) { return std::unique_ptr<WireFormat>(); }},
    {"lossless",
     [](const CodecSpec& spec) -> std::unique_ptr<WireFormat> {
       return std::make_unique<LosslessFormat>(spec.half_values);
     }},
    {"int4", [](const CodecSpec&) -> std::unique_ptr<WireFormat> { return std::make_unique<IntegerFormat>(4); }},
    {"int2", [](const CodecSpec&) -> std::unique_ptr<WireFormat> { return std::make_unique<IntegerFormat>(2); }},
};

const Entry& entry(CodecKind kind) { return kCodecs[static_cast<int>(kind)]; }

// `holds` is false for NaN too.
template <class T>
void require(bool holds, const char* field, T value, const char* expected) {
  if (holds) return;
  std::ostringstream text;
  text << "[codec] " << field << " is " << value << ", expected " << expected;
  fail(ErrorKind::kInvalidArgument, text.str());
}

}  // namespace

const char* codec_kind_name(CodecKind kind) { return entry(kind).name; }

std::string codec_name(const CodecSpec& spec) {
  std::ostringstream text;
  text << entry(spec.kind).name;
  if (spec.kind == CodecKind::kFloat16 && spec.scale != 0.0) text << " scaled by " << spec.scale;
  if (spec.kind == CodecKind::kTopK) text << " " << spec.ratio << (spec.half_values ? ", float16 values" : "");
  if (spec.kind == CodecKind::kLossless && spec.half_values) text << ", bfloat16 tensors";
  if (spec.kind == CodecKind::kRotate) text << " 1/" << spec.every;
  if (spec.kind == CodecKind::kInside && spec.every > 1) text << ", with rotating averages of 1/" << spec.every;
  if (spec.kind == CodecKind::kRotate && spec.momentum != 1.0) text << ", momentum " << spec.momentum;
  if (spec.kind == CodecKind::kLowRank) text << " of rank " << spec.matrix_rank;
  return text.str();
}

void check_codec(const CodecSpec& spec) {
  require(static_cast<int>(spec.kind) < kCodecKinds, "kind", static_cast<int>(spec.kind), "0 to 10");
  require(spec.ratio > 0.0 && spec.ratio <= 1.0, "ratio", spec.ratio, "above 0, at most 1");
  require(spec.warm_up >= 0, "warm_up", spec.warm_up, "at least 0");
  require(spec.every >= 1, "every", spec.every, "at least 1");
  require(spec.momentum >= 0.0 && spec.momentum <= 1.0, "momentum", spec.momentum, "0 to 1");
  require(spec.matrix_rank >= 1, "matrix_rank", spec.matrix_rank, "at least 1");
  require(spec.scale == 0.0 || (spec.scale >= kSmallestHalfScale && spec.scale <= kLargestHalfScale), "scale",
          spec.scale, "1.2e-38 to 8.5e37, or 0 for one of each chunk's own");
}

std::unique_ptr<WireFormat> make_codec(const CodecSpec& spec) {
  check_codec(spec);
  return entry(spec.kind).make(spec);
}

bool encoded_by_gpus(CodecKind kind) {
  return kind == CodecKind::kFloat16 || kind == CodecKind::kBFloat16 || kind == CodecKind::kInt8 ||
         kind == CodecKind::kInt4 || kind == CodecKind::kInt2 || kind == CodecKind::kTopK;
}

bool keeps_residual(const CodecSpec& spec) {
  if (spec.kind == CodecKind::kLowRank) return true;
  const std::unique_ptr<WireFormat> format = make_codec(spec);
  return format && format->keeps_residual();
}

}  // namespace perseus

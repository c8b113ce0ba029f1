// Which codec gradients travel in, and the table that makes one. Thread-safe: values and stateless objects.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/fields.h"
#include "collective/wire_format.h"

namespace perseus {

enum class CodecKind : uint8_t {
  kNone = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kInt8 = 3,
  kTopK = 4,
  kRotate = 5,
  kInside = 6,
  kLowRank = 7,
  kLossless = 8,
  kInt4 = 9,
  kInt2 = 10
};
constexpr int kCodecKinds = 11;

// Fields that a kind has no use for keep their defaults: specs are compared as a whole.
struct CodecSpec {
  CodecKind kind = CodecKind::kNone;
  double ratio = 1.0;        // top-k: the part of the elements that is sent, in (0, 1]
  bool half_values = false;  // top-k: values travel as f16; lossless: as bf16, of bf16 tensors
  int warm_up = 0;           // steps, >= 0. top-k: the ratio falls in them, see TopKFormat; low rank: none is
  int every = 1;             // rotating subset: each element is sent once in so many steps, >= 1; inside: the caller
                             // averages each parameter between hosts as often; 1 where it does otherwise
  double momentum = 1.0;     // rotating subset: what a held value is multiplied by in each step, in [0, 1]
  int matrix_rank = 1;       // low rank: of what takes a gradient's place, >= 1
  double scale = 0.0;        // f16: the factor before rounding, > 0; 0 = chosen for each chunk from its largest element

  static constexpr auto fields() {
    return std::make_tuple(field("kind", &CodecSpec::kind), field("ratio", &CodecSpec::ratio),
                           field("half_values", &CodecSpec::half_values), field("warm_up", &CodecSpec::warm_up),
                           field("every", &CodecSpec::every), field("momentum", &CodecSpec::momentum),
                           field("matrix_rank", &CodecSpec::matrix_rank), field("scale", &CodecSpec::scale));
  }
};
inline bool operator==(const CodecSpec& a, const CodecSpec& b) { return same_fields(a, b); }
inline bool operator!=(const CodecSpec& a, const CodecSpec& b) { return !(a == b); }

const char* codec_kind_name(CodecKind kind);  // "float16", "top-k", …
// "top-k 0.01, f16 values": for messages.
std::string codec_name(const CodecSpec& spec);

// Throws Error(kInvalidArgument) that names the field, its value and what was expected.
void check_codec(const CodecSpec& spec);

// The codec that a valid spec asks for, null where elements travel as they are, or not at all, or are not encoded one
// by one (see low_rank.h). Throws as check_codec does.
std::unique_ptr<WireFormat> make_codec(const CodecSpec& spec);

// Do GPUs encode it, too (cuda/chunk_kernels.cu)? Top-k without momentum correction.
bool encoded_by_gpus(CodecKind kind);

// Does a valid spec's codec keep a residual?
bool keeps_residual(const CodecSpec& spec);

}  // namespace perseus

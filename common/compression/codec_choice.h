// The codec `auto`: the cost of an allreduce with each codec, by a model of the links and of encoding, and the choice
// among them. Pure functions over plain values but for measure_codecs; docs/algorithms.md, "Choice", has the
// arithmetic.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "codec/codec.h"
#include "topology/link_speed.h"

namespace perseus {

// The codecs that auto chooses among, the most accurate first.
constexpr std::array<CodecKind, 5> kAutoKinds = {CodecKind::kNone, CodecKind::kFloat16, CodecKind::kInt8,
                                                 CodecKind::kInt4, CodecKind::kInt2};
constexpr int kAutoCodecs = static_cast<int>(kAutoKinds.size());
// The place of the least accurate one for gradients of optimizers that are not known to step in proportion to them:
// what int4 and int2 put off disturbs Adam's second moments (docs/accuracy.md).
constexpr int kAutoForAll = 2;
static_assert(kAutoKinds[kAutoForAll] == CodecKind::kInt8);
// A less accurate codec must be faster by this much, so that differences within the measurements' noise do not decide.
constexpr double kAutoGain = 0.05;

// Per encoded byte of float32; with error feedback if the codec keeps a residual.
struct CodecCost {
  double encode_s = 0, decode_s = 0;  // per byte
  double wire = 1;                    // bytes sent
};

// Everything a choice depends on; the same on all ranks of a group.
struct Speeds {
  LinkSpeed link;
  std::array<CodecCost, kAutoCodecs> codecs;  // ordered as kAutoKinds
  int groups = 1, shards = 1;                 // see Levels
};

// Seconds for a float32 tensor of so many bytes through kAutoKinds[codec], between the inner groups.
double estimated_seconds(const Speeds& speeds, int codec, uint64_t bytes);
// Index in kAutoKinds: of those up to `least`, the most accurate codec that is within kAutoGain of the fastest.
int choose_codec(const Speeds& speeds, uint64_t bytes, int least = kAutoCodecs - 1);
// "…: exact, from 9 KiB int8, from 20 KiB int4": for the log.
std::string describe_choice(const Speeds& speeds, const std::array<CodecSpec, kAutoCodecs>& specs);

// Encodes and decodes some megabytes with every codec on these threads, for about 20 ms.
std::array<CodecCost, kAutoCodecs> measure_codecs(const std::array<CodecSpec, kAutoCodecs>& specs, ThreadPool* threads);

// Conversion to values that ranks agree on, and back.
std::vector<double> to_values(const std::array<CodecCost, kAutoCodecs>& costs);
std::array<CodecCost, kAutoCodecs> from_values(const std::vector<double>& values);

}  // namespace perseus

// The cost model, and the measurement of encoding.
#include "compression/codec_choice.h"

#include <algorithm>
#include <sstream>

#include "base/clock.h"

namespace perseus {
namespace {

// More than fits into a core's own caches, as gradients are.
constexpr size_t kMeasuredChunks = 64;
constexpr int kMeasuredTimes = 3;
constexpr uint64_t kWarm = uint64_t{1} << 32;  // a step after every warm-up
constexpr uint64_t kLargest = uint64_t{1} << 30;

// Somewhat like a gradient: as many small values as large ones, none equal.
std::vector<float> sample() {
  std::vector<float> x(kMeasuredChunks * kWireChunk);
  uint32_t state = 1;
  for (float& value : x) {
    state = state * 1664525U + 1013904223U;
    const float uniform = static_cast<float>(state >> 8) * 0x1p-23F - 1.0F;
    value = uniform * uniform * uniform;
  }
  return x;
}

double seconds_since(int64_t begun_ns) { return static_cast<double>(now_ns() - begun_ns) * 1e-9; }

// Encodes a slice; `encoded` has `room` for each of its chunks.
void encode_slice(const WireFormat& format, const std::vector<float>& x, std::vector<float>* residual, uint64_t step,
                  size_t room, ThreadPool* threads, std::vector<Byte>* encoded, std::vector<size_t>* sizes) {
  std::vector<ChunkSelection> chunks;
  for (size_t c = 0; c < kMeasuredChunks; ++c)
    chunks.push_back({x.data() + c * kWireChunk, residual->empty() ? nullptr : residual->data() + c * kWireChunk,
                      nullptr, kWireChunk});
  std::vector<uint16_t> indices;
  if (format.selects()) format.select(chunks.data(), chunks.size(), step, threads, &indices);
  threads->parallel_for(kMeasuredChunks, [&](size_t c, size_t) {
    const ChunkSelection& chunk = chunks[c];
    Byte* const to = encoded->data() + c * room;
    (*sizes)[c] = format.selects() ? format.encode_selected(chunk, indices.data(), to)
                                   : format.encode(chunk.x, chunk.residual, chunk.count, step, to);
  });
}

CodecCost measure(const WireFormat& format, const std::vector<float>& x, ThreadPool* threads) {
  const size_t room = format.most_bytes(kWireChunk);
  std::vector<float> residual(format.keeps_residual() ? x.size() : 0), out(x.size());
  std::vector<Byte> encoded(room * kMeasuredChunks);
  std::vector<size_t> sizes(kMeasuredChunks);
  double encode = 0, decode = 0, wire = 0;
  // The first time touches all memory, and finds a residual that is still zero.
  for (int time = 0; time <= kMeasuredTimes; ++time) {
    int64_t begun = now_ns();
    encode_slice(format, x, &residual, kWarm + static_cast<uint64_t>(time), room, threads, &encoded, &sizes);
    const double encoding = seconds_since(begun);
    begun = now_ns();
    threads->parallel_for(kMeasuredChunks, [&](size_t c, size_t) {
      format.decode(encoded.data() + c * room, sizes[c], kWireChunk, out.data() + c * kWireChunk);
    });
    const double decoding = seconds_since(begun);
    encode = time <= 1 ? encoding : std::min(encode, encoding);
    decode = time <= 1 ? decoding : std::min(decode, decoding);
    wire = 0;
    for (size_t size : sizes) wire += static_cast<double>(size);
  }
  const double bytes = static_cast<double>(x.size() * sizeof(float));
  return CodecCost{encode / bytes, decode / bytes, wire / bytes};
}

std::string size_text(uint64_t bytes) {
  if (bytes >= (1 << 20) && bytes % (1 << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  return bytes >= 1024 ? std::to_string(bytes >> 10) + " KiB" : std::to_string(bytes) + " bytes";
}

}  // namespace

double estimated_seconds(const Speeds& speeds, int codec, uint64_t bytes) {
  const CodecCost& cost = speeds.codecs[static_cast<size_t>(codec)];
  const double members = speeds.groups;
  const double shard = static_cast<double>(bytes) / speeds.shards;
  const double sent = 2 * (members - 1) / members * speeds.link.seconds_per_byte * shard * cost.wire;
  if (kAutoKinds[static_cast<size_t>(codec)] == CodecKind::kNone) return speeds.link.latency_s + sent;
  // Encoded are the own gradient and the owned part of the mean; decoded what comes for that part, and the result.
  const double work = shard * ((1 + 1 / members) * cost.encode_s + 2 * cost.decode_s);
  return 2 * speeds.link.latency_s + sent + work;
}

int choose_codec(const Speeds& speeds, uint64_t bytes, int least) {
  if (speeds.groups < 2) return 0;
  double fastest = estimated_seconds(speeds, 0, bytes);
  for (int codec = 1; codec <= least; ++codec) fastest = std::min(fastest, estimated_seconds(speeds, codec, bytes));
  int codec = 0;
  while (estimated_seconds(speeds, codec, bytes) * (1 - kAutoGain) > fastest) ++codec;
  return codec;
}

std::string describe_choice(const Speeds& speeds, const std::array<CodecSpec, kAutoCodecs>& specs) {
  std::ostringstream text;
  text.precision(3);
  text << "auto: between hosts " << 8e-9 / speeds.link.seconds_per_byte << " Gbit/s, " << speeds.link.latency_s * 1e6
       << " us (measurement " << speeds.link.number << "); ms for 64 MiB:";
  for (int codec = 0; codec < kAutoCodecs; ++codec)
    text << (codec > 0 ? ", " : " ") << codec_name(specs[static_cast<size_t>(codec)]) << " "
         << estimated_seconds(speeds, codec, 64 << 20) * 1e3;
  text << ". Gradients travel as ";
  int last = choose_codec(speeds, 0);
  text << codec_name(specs[static_cast<size_t>(last)]);
  // Where choices change is found to a 1024-th of a power of two, which is exact for what settings say.
  for (uint64_t octave = 1024; octave < kLargest; octave *= 2) {
    for (uint64_t bytes = octave; bytes < 2 * octave; bytes += octave / 1024) {
      const int codec = choose_codec(speeds, bytes);
      if (codec == last) continue;
      text << ", from " << size_text(bytes) << " " << codec_name(specs[static_cast<size_t>(codec)]);
      last = codec;
    }
  }
  if (last > kAutoForAll) text << "; with optimizers other than SGD, none has fewer bits than int8";
  return text.str();
}

std::array<CodecCost, kAutoCodecs> measure_codecs(const std::array<CodecSpec, kAutoCodecs>& specs,
                                                  ThreadPool* threads) {
  std::array<CodecCost, kAutoCodecs> costs;
  const std::vector<float> x = sample();
  for (size_t i = 0; i < specs.size(); ++i) {
    const std::unique_ptr<WireFormat> format = make_codec(specs[i]);
    if (format) costs[i] = measure(*format, x, threads);
  }
  return costs;
}

std::vector<double> to_values(const std::array<CodecCost, kAutoCodecs>& costs) {
  std::vector<double> values;
  for (const CodecCost& cost : costs) values.insert(values.end(), {cost.encode_s, cost.decode_s, cost.wire});
  return values;
}

std::array<CodecCost, kAutoCodecs> from_values(const std::vector<double>& values) {
  std::array<CodecCost, kAutoCodecs> costs;
  for (size_t i = 0; i < costs.size(); ++i) costs[i] = CodecCost{values[3 * i], values[3 * i + 1], values[3 * i + 2]};
  return costs;
}

}  // namespace perseus

// Chunks of every codec: bytes that somebody else has encoded never write behind the elements, nor read behind the
// bytes, and decode(), decode_streamed() and decode_add() understand the same.
#include "codec/codec.h"
#include "fuzz.h"
#include "kernels/kernels.h"

using namespace perseus;
using perseus_fuzz::expect;

namespace {

CodecSpec spec_of(perseus_fuzz::Input* input) {
  constexpr CodecKind kKinds[] = {CodecKind::kFloat16, CodecKind::kBFloat16, CodecKind::kInt8, CodecKind::kTopK,
                                  CodecKind::kRotate,  CodecKind::kLossless, CodecKind::kInt4, CodecKind::kInt2};
  CodecSpec spec;
  spec.kind = kKinds[input->choice(std::size(kKinds))];
  const bool half = input->byte() % 2 == 1;
  if (spec.kind == CodecKind::kTopK) spec.ratio = half ? 0.01 : 0.5;
  if (spec.kind == CodecKind::kTopK || spec.kind == CodecKind::kLossless) spec.half_values = half;
  if (spec.kind == CodecKind::kRotate) spec.every = half ? 3 : 1;
  return spec;
}

// Nothing where the chunk is refused.
std::vector<float> decoded(const WireFormat& format, std::vector<Byte> chunk, size_t count, int way) {
  chunk.shrink_to_fit();
  std::vector<float> x(count, 0.0F);
  x.shrink_to_fit();
  try {
    if (way == 0) format.decode(chunk.data(), chunk.size(), count, x.data());
    if (way == 1) format.decode_streamed(chunk.data(), chunk.size(), count, x.data());
    if (way == 2) format.decode_add(chunk.data(), chunk.size(), count, x.data());
  } catch (const Error& error) {
    expect(error.kind() == ErrorKind::kIo, "a bad chunk is an error of the peer");
    return {};
  }
  return x;
}

bool same_values(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](float one, float other) {
           return one == other || (one != one && other != other);
         });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  perseus_fuzz::Input input(data, size);
  const std::unique_ptr<WireFormat> format = make_codec(spec_of(&input));
  const size_t count = input.choice(2) == 0 ? 1 + input.choice(200) : 1 + input.choice(kWireChunk);
  std::vector<Byte> chunk;
  if (input.byte() % 2 == 0) {  // a genuine one, with some bytes changed
    std::vector<float> x(count);
    for (size_t i = 0; i < count; ++i) x[i] = static_cast<float>(static_cast<int>(i * 7 % 23) - 11) / 8.0F;
    chunk.resize(format->most_bytes(count));
    chunk.resize(format->encode(x.data(), nullptr, count, input.byte(), chunk.data()));
    for (size_t changes = input.choice(6); changes > 0; --changes) {
      const size_t at = sizeof(uint32_t) + input.choice(chunk.size() - sizeof(uint32_t));
      chunk[at] = input.byte();
    }
  } else {
    const std::vector<uint8_t> rest = input.take(format->most_bytes(count));
    chunk.assign(rest.begin(), rest.end());
    chunk.resize(std::max<size_t>(sizeof(uint32_t), (chunk.size() + 3) / 4 * 4));
  }
  const uint32_t bytes = static_cast<uint32_t>(chunk.size());
  std::memcpy(chunk.data(), &bytes, sizeof bytes);
  const std::vector<float> once = decoded(*format, chunk, count, 0);
  expect(same_values(once, decoded(*format, chunk, count, 1)), "decode_streamed() gives what decode() gives");
  std::vector<float> added = decoded(*format, chunk, count, 2);
  // 0 + x is x.
  expect(same_values(once, added), "decode_add() adds what decode() gives");
  return 0;
}

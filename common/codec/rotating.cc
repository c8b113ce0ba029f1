// Chunks of the rotating subset. Thread-safe.
#include "codec/rotating.h"

#include <algorithm>

#include "codec/chunk.h"
#include "kernels/kernels.h"

namespace perseus {
namespace {

using kernels::Arrival;

constexpr size_t kBlock = 16;
constexpr const char* kName = "rotating";

}  // namespace

template <class Visit>
void RotatingFormat::for_sent(uint32_t first, size_t count, const Visit& visit) const {
  if (every_ == 1) return visit(size_t{0}, count);
  for (size_t begin = first * kBlock; begin < count; begin += every_ * kBlock)
    visit(begin, std::min(kBlock, count - begin));
}

size_t RotatingFormat::sparse_bytes(uint32_t first, size_t count) const {
  size_t sent = 0;
  for_sent(first, count, [&](size_t, size_t n) { sent += n; });
  return sizeof(ChunkHeader) + sent * sizeof(float);
}

size_t RotatingFormat::most_bytes(size_t count) const { return dense_bytes(count); }

size_t RotatingFormat::encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const {
  const float* v = residual != nullptr ? residual : x;
  const uint32_t largest = residual != nullptr ? kernels::add_to_residual(x, momentum_, residual, count)
                                               : kernels::largest_magnitude(x, count);
  if (largest >= kernels::kNotFinite) return encode_dense(v, residual, count, to);
  const auto first = static_cast<uint32_t>((every_ - step % every_) % every_);
  Byte* at = to + sizeof(ChunkHeader);
  for_sent(first, count, [&](size_t begin, size_t n) {
    std::memcpy(at, v + begin, n * sizeof(float));
    if (residual != nullptr) std::memset(residual + begin, 0, n * sizeof(float));
    at += n * sizeof(float);
  });
  return put_header(to, static_cast<size_t>(at - to), first);
}

size_t RotatingFormat::encode_whole(const float* x, size_t count, Byte* to) const {
  return encode_dense(x, nullptr, count, to);
}

bool RotatingFormat::is_sparse(const Byte* from, size_t bytes, size_t count, uint32_t* first) const {
  *first = read_header(kName, from, bytes, count).form;
  if (*first == kDenseForm) return false;
  if (*first >= every_ || bytes != sparse_bytes(*first, count)) bad_chunk(kName, bytes, count);
  return true;
}

void RotatingFormat::decode(const Byte* from, size_t bytes, size_t count, float* x) const {
  uint32_t first;
  const Byte* at = from + sizeof(ChunkHeader);
  if (!is_sparse(from, bytes, count, &first)) return decode_dense(at, count, x, Arrival::kStore);
  std::memset(x, 0, count * sizeof(float));
  for_sent(first, count, [&](size_t begin, size_t n) {
    std::memcpy(x + begin, at, n * sizeof(float));
    at += n * sizeof(float);
  });
}

void RotatingFormat::decode_add(const Byte* from, size_t bytes, size_t count, float* x) const {
  uint32_t first;
  const Byte* at = from + sizeof(ChunkHeader);
  if (!is_sparse(from, bytes, count, &first)) return decode_dense(at, count, x, Arrival::kAdd);
  for_sent(first, count, [&](size_t begin, size_t n) {
    decode_dense(at, n, x + begin, Arrival::kAdd);
    at += n * sizeof(float);
  });
}

}  // namespace perseus

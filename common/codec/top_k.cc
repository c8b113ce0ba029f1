// Top-k chunks. Thread-safe.
#include "codec/top_k.h"

#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "codec/chunk.h"
#include "codec/half.h"
#include "codec/select.h"

namespace perseus {
namespace {

using kernels::Arrival;

enum Kind : uint32_t { kIndices = 0, kBits = 1 };

size_t indices_bytes(size_t n) { return padded(2 * n); }
size_t bits_bytes(size_t count) { return (count + 31) / 32 * 4; }
Kind kind_of(size_t n, size_t count) { return indices_bytes(n) <= bits_bytes(count) ? kIndices : kBits; }

size_t positions_bytes(size_t n, size_t count) {
  return kind_of(n, count) == kIndices ? indices_bytes(n) : bits_bytes(count);
}

size_t put_positions(const uint16_t* indices, size_t n, size_t count, Byte* to) {
  if (kind_of(n, count) == kIndices) {
    std::memset(to + indices_bytes(n) - 4, 0, 4);  // what pads
    std::memcpy(to, indices, 2 * n);
    return indices_bytes(n);
  }
  uint32_t bits[kWireChunk / 32] = {};
  for (size_t i = 0; i < n; ++i) bits[indices[i] / 32] |= uint32_t{1} << (indices[i] % 32);
  std::memcpy(to, bits, bits_bytes(count));
  return bits_bytes(count);
}

// False where there are not n of them, or one lies beyond the chunk.
bool get_positions(const Byte* from, size_t n, size_t count, uint16_t* indices) {
  if (kind_of(n, count) == kIndices) {
    std::memcpy(indices, from, 2 * n);
    for (size_t i = 1; i < n; ++i)
      if (indices[i] <= indices[i - 1]) return false;
    return indices[n - 1] < count;
  }
  size_t found = 0;
  for (size_t at = 0; at < bits_bytes(count); at += 4) {
    uint32_t bits;
    std::memcpy(&bits, from + at, 4);
    for (; bits != 0; bits &= bits - 1) {
      const size_t index = 8 * at + static_cast<size_t>(__builtin_ctz(bits));
      if (index >= count || found == n) return false;
      indices[found++] = static_cast<uint16_t>(index);
    }
  }
  return found == n;
}

// Of a chunk, by a GPU.
uint32_t largest_of(const Byte* magnitudes, size_t count) {
  uint32_t largest = 0;
  for (size_t begin = 0; begin < count; begin += kWireShare) {
    uint32_t of_share;
    std::memcpy(&of_share, magnitudes + begin / kWireShare * sizeof of_share, sizeof of_share);
    largest = std::max(largest, of_share);
  }
  return largest;
}

}  // namespace

struct TopKFormat::Sparse {
  size_t n;
  uint16_t indices[kWireChunk];
  float values[kWireChunk];
};

size_t TopKFormat::sparse_bytes(size_t n, size_t count) const {
  if (n == 0) return sizeof(ChunkHeader);
  const size_t values = half_values_ ? sizeof(float) + padded(2 * n) : n * sizeof(float);
  return sizeof(ChunkHeader) + positions_bytes(n, count) + values;
}

size_t TopKFormat::most_bytes(size_t count) const { return dense_bytes(count); }

size_t TopKFormat::elements_sent(size_t count, uint64_t step) const {
  double ratio = ratio_;
  const uint64_t before = step > 0 ? step - 1 : 0;
  if (ratio < kWarmUpBelow && before < warm_up_)
    ratio = kFirstRatio * std::pow(ratio / kFirstRatio, static_cast<double>(before) / static_cast<double>(warm_up_));
  const auto k = static_cast<size_t>(std::max(1.0, ratio * static_cast<double>(count) + 0.5));
  return std::min(k, count);
}

size_t TopKFormat::encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const {
  ChunkSelection chunk{x, residual, nullptr, count};
  std::vector<uint16_t> indices;
  select(&chunk, 1, step, &ThreadPool::none(), &indices);
  return encode_selected(chunk, indices.data(), to);
}

size_t TopKFormat::encode_whole(const float* x, size_t count, Byte* to) const {
  return encode_dense(x, nullptr, count, to);
}

void TopKFormat::select(ChunkSelection* chunks, size_t n, uint64_t step, ThreadPool* threads,
                        std::vector<uint16_t>* indices) const {
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) count += chunks[i].count;
  threads->for_parts(n, count, [&](size_t begin, size_t end, size_t) {
    for (size_t i = begin; i < end; ++i) {
      ChunkSelection& chunk = chunks[i];
      // The largest magnitude stands there until the first index is known.
      chunk.first = chunk.magnitudes != nullptr ? largest_of(chunk.magnitudes, chunk.count)
                    : chunk.residual != nullptr ? kernels::add_to_residual(chunk.x, 1.0f, chunk.residual, chunk.count)
                                                : kernels::largest_magnitude(chunk.x, chunk.count);
    }
  });
  std::vector<SelectFrom> finite;
  finite.reserve(n);
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    ChunkSelection& chunk = chunks[i];
    const auto magnitude = static_cast<uint32_t>(chunk.first);
    chunk.selected = magnitude >= kernels::kNotFinite ? ChunkSelection::kAll : 0;
    if (chunk.selected == ChunkSelection::kAll) {
      count -= chunk.count;
      continue;
    }
    finite.push_back({chunk.residual != nullptr ? chunk.residual : chunk.x, chunk.count});
    largest = std::max(largest, magnitude);
  }
  if (finite.empty()) return;
  size_t first = indices->size();
  select_largest(finite.data(), finite.size(), elements_sent(count, step), largest, threads, indices);
  const SelectFrom* found = finite.data();
  for (size_t i = 0; i < n; ++i) {
    if (chunks[i].selected == ChunkSelection::kAll) continue;
    chunks[i].selected = found->selected;
    chunks[i].first = first;
    first += found->selected;
    ++found;
  }
}

size_t TopKFormat::encode_selected(const ChunkSelection& chunk, const uint16_t* all_indices, Byte* to) const {
  float* const residual = chunk.residual;
  const float* v = residual != nullptr ? residual : chunk.x;
  const size_t count = chunk.count, n = chunk.selected;
  const size_t bytes = n == ChunkSelection::kAll ? dense_bytes(count) : sparse_bytes(n, count);
  if (bytes >= dense_bytes(count)) {
    const size_t written = encode_dense(v, residual, count, to);
    if (chunk.masked != nullptr) std::memset(chunk.masked, 0, count * sizeof(float));
    return written;
  }
  if (n == 0) return put_header(to, bytes, 0);

  const uint16_t* const indices = all_indices + chunk.first;
  Byte* at = to + sizeof(ChunkHeader);
  float values[kWireChunk];
  for (size_t i = 0; i < n; ++i) values[i] = v[indices[i]];
  if (half_values_) {
    const float scale = half_scale(kernels::largest_magnitude(values, n)), unscale = 1.0f / scale;
    std::memcpy(at, &unscale, sizeof unscale);
    at += sizeof unscale;
    at += put_positions(indices, n, count, at);
    std::memset(to + bytes - 4, 0, 4);  // what pads
    kernels::encode_halves(DType::kFloat16, values, scale, unscale, n, at, values);
  } else {
    at += put_positions(indices, n, count, at);
    std::memcpy(at, values, n * sizeof(float));
    std::memset(values, 0, n * sizeof(float));
  }
  if (residual != nullptr) {
    for (size_t i = 0; i < n; ++i) residual[indices[i]] = values[i];
  }
  if (chunk.masked != nullptr) {
    for (size_t i = 0; i < n; ++i) chunk.masked[indices[i]] = 0.0F;
  }
  return put_header(to, bytes, static_cast<uint32_t>(n) | kind_of(n, count) << 16);
}

size_t TopKFormat::encode_result(const float* x, float* residual, size_t count, uint64_t,
                                 const std::vector<const Byte*>& parts, Byte* to) const {
  size_t most = 1;
  for (const Byte* part : parts) {
    ChunkHeader header;
    std::memcpy(&header, part, sizeof header);
    most = std::max(most, header.form == kDenseForm ? count : size_t{header.form & 0xffff});
  }
  const float* v = residual != nullptr ? residual : x;
  const uint32_t largest =
      residual != nullptr ? kernels::add_to_residual(x, 1.0f, residual, count) : kernels::largest_magnitude(x, count);
  ChunkSelection chunk{x, residual, nullptr, count};
  chunk.selected = ChunkSelection::kAll;
  if (largest >= kernels::kNotFinite) return encode_selected(chunk, nullptr, to);
  const size_t limit = kResultGrowth * most;
  std::vector<uint16_t> indices;
  if (limit < count && kernels::count_at_least(v, count, 1) > limit) {
    SelectFrom from{v, count};
    select_largest(&from, 1, limit, largest, &ThreadPool::none(), &indices);
    chunk.selected = from.selected;
  } else {
    indices.resize(count);
    chunk.selected = kernels::find_at_least(v, count, 1, indices.data());
  }
  return encode_selected(chunk, indices.data(), to);
}

void TopKFormat::parse(const Byte* from, size_t bytes, size_t count, uint32_t form, Sparse* sparse) const {
  const size_t n = form & 0xffff;
  sparse->n = n;
  if (n > count || bytes != sparse_bytes(n, count) || bytes >= dense_bytes(count) || form >> 16 != kind_of(n, count))
    bad_chunk("top-k", bytes, count);
  if (n == 0) return;
  const Byte* at = from + sizeof(ChunkHeader);
  float unscale = 1.0f;
  if (half_values_) {
    std::memcpy(&unscale, at, sizeof unscale);
    at += sizeof unscale;
  }
  if (!is_half_unscale(unscale) || !get_positions(at, n, count, sparse->indices)) bad_chunk("top-k", bytes, count);
  at += positions_bytes(n, count);
  if (half_values_) kernels::decode_halves(DType::kFloat16, at, unscale, n, sparse->values, Arrival::kStore);
  else std::memcpy(sparse->values, at, n * sizeof(float));
}

void TopKFormat::check(const Byte* from, size_t bytes, size_t count) const {
  const ChunkHeader header = read_header("top-k", from, bytes, count);
  if (header.form == kDenseForm) return;
  Sparse sparse;
  parse(from, bytes, count, header.form, &sparse);
}

void TopKFormat::decode(const Byte* from, size_t bytes, size_t count, float* x) const {
  const ChunkHeader header = read_header("top-k", from, bytes, count);
  if (header.form == kDenseForm) return decode_dense(from + sizeof header, count, x, Arrival::kStore);
  Sparse sparse;
  parse(from, bytes, count, header.form, &sparse);
  std::memset(x, 0, count * sizeof(float));
  for (size_t i = 0; i < sparse.n; ++i) x[sparse.indices[i]] = sparse.values[i];
}

void TopKFormat::decode_add(const Byte* from, size_t bytes, size_t count, float* x) const {
  const ChunkHeader header = read_header("top-k", from, bytes, count);
  if (header.form == kDenseForm) return decode_dense(from + sizeof header, count, x, Arrival::kAdd);
  Sparse sparse;
  parse(from, bytes, count, header.form, &sparse);
  kernels::add_at(x, sparse.indices, sparse.values, sparse.n);
}

}  // namespace perseus

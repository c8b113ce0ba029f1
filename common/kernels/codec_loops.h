// Loops over the chunks that codecs work on: magnitudes, residuals, casts with a scale. Internal linkage, see
// variant.h; no threads.
#pragma once

#include <type_traits>
#include <utility>

#include "kernels/page_walk.h"
#include "kernels/reduce_types.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {

constexpr size_t kLineFloats = 64 / sizeof(float);

PERSEUS_INLINE Floats load_floats(const float* from) {
  return load_vector<Floats>(reinterpret_cast<const unsigned char*>(from));
}
PERSEUS_INLINE void store_floats(float* to, Floats value) { store_vector(reinterpret_cast<unsigned char*>(to), value); }

PERSEUS_INLINE Ints magnitudes(Floats value) { return same_bits<Ints>(value) & 0x7fffffff; }
PERSEUS_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
template <size_t kBy, size_t... kLane>
PERSEUS_INLINE Ints rotated(Ints values, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(values, values, static_cast<int>((kLane + kBy) % kFloatLanes)...);
}
// Of values that are not negative.
template <size_t kHalf = kFloatLanes / 2>
PERSEUS_INLINE uint32_t largest_lane(Ints values) {
  values = larger(values, rotated<kHalf>(values, std::make_index_sequence<kFloatLanes>()));
  if constexpr (kHalf > 1) return largest_lane<kHalf / 2>(values);
  else return static_cast<uint32_t>(values[0]);
}
PERSEUS_INLINE Floats finite_or_zero(Floats value) {
  constexpr int32_t kInfinity = 0x7f800000;
  return magnitudes(value) < kInfinity ? value : Floats{};
}
PERSEUS_INLINE Floats canonical_nan(Floats value) {
  Floats quiet = Floats{} + __builtin_nanf("");
  return value == value ? value : quiet;
}

// Calls visit(i) for the first element of every whole vector in [0, count), pages interleaved; gives the number of
// elements visited.
template <class Visit>
PERSEUS_INLINE size_t for_vectors(size_t count, const Visit& visit) {
  size_t at = walk_pages<kGroupBytes>(count * sizeof(float), [&](size_t byte) __attribute__((always_inline)) {
    for (size_t v = 0; v < kGroupBytes; v += sizeof(Floats)) visit((byte + v) / sizeof(float));
  });
  for (at /= sizeof(float); count - at >= kFloatLanes; at += kFloatLanes) visit(at);
  return at;
}

// Fewer elements than a vector, zeros after them.
PERSEUS_INLINE Floats load_some(const float* from, size_t count) {
  float some[kFloatLanes] = {};
  __builtin_memcpy(some, from, count * sizeof(float));
  return load_floats(some);
}
PERSEUS_INLINE void store_some(float* to, Floats value, size_t count) {
  __builtin_memcpy(to, &value, count * sizeof(float));
}

// ---- magnitudes, residuals ----------------------------------------------------------------------------------------

uint32_t largest_magnitude_any(const float* x, size_t count) {
  Ints largest{};
  const auto look = [&](Floats value) __attribute__((always_inline)) { largest = larger(largest, magnitudes(value)); };
  size_t at = for_vectors(count, [&](size_t i) __attribute__((always_inline)) { look(load_floats(x + i)); });
  look(load_some(x + at, count - at));
  return largest_lane(largest);
}

uint32_t largest_finite_magnitude_any(const float* x, size_t count) {
  Ints largest{};
  const auto look = [&](Floats value) __attribute__((always_inline)) {
    largest = larger(largest, magnitudes(finite_or_zero(value)));
  };
  size_t at = for_vectors(count, [&](size_t i) __attribute__((always_inline)) { look(load_floats(x + i)); });
  look(load_some(x + at, count - at));
  return largest_lane(largest);
}

uint32_t add_to_residual_any(const float* x, float momentum, float* residual, size_t count) {
  Ints largest{};
  const auto sum = [&](Floats value, Floats held) __attribute__((always_inline)) {
    value = value + held * momentum;
    largest = larger(largest, magnitudes(value));
    return value;
  };
  size_t at = for_vectors(count, [&](size_t i) __attribute__((always_inline)) {
    store_floats(residual + i, sum(load_floats(x + i), load_floats(residual + i)));
  });
  size_t left = count - at;
  store_some(residual + at, sum(load_some(x + at, left), load_some(residual + at, left)), left);
  return largest_lane(largest);
}

// ---- 16-bit floats ------------------------------------------------------------------------------------------------

// Where decoded vectors go.
template <Arrival kArrival>
PERSEUS_INLINE void arrive(float* x, Floats value) {
  if constexpr (kArrival == Arrival::kStore) store_floats(x, value);
  if constexpr (kArrival == Arrival::kStream) stream_vector(reinterpret_cast<unsigned char*>(x), value);
  if constexpr (kArrival == Arrival::kAdd) store_floats(x, canonical_nan(load_floats(x) + value));
}
template <Arrival kArrival>
PERSEUS_INLINE void some_arrive(float* x, Floats value, size_t count) {
  if constexpr (kArrival == Arrival::kAdd) value = canonical_nan(load_some(x, count) + value);
  store_some(x, value, count);
}

// Streaming wants whole vectors; where x does not lie so, ordinary stores do.
PERSEUS_INLINE Arrival possible_arrival(Arrival wanted, const float* x) {
  bool aligned = reinterpret_cast<uintptr_t>(x) % sizeof(Floats) == 0;
  return wanted == Arrival::kStream && !aligned ? Arrival::kStore : wanted;
}

template <class Format, bool kResidual>
void encode_halves_as(const HalfEncodeTask& task) {
  const float scale = task.scale, unscale = task.unscale;
  const auto round = [=](Floats v, Floats* rest) __attribute__((always_inline)) {
    Floats scaled = v * scale;
    if constexpr (std::is_same_v<Format, BFloat16>) scaled = canonical_nan(scaled);
    Halves half = Format::encode(scaled);
    if constexpr (kResidual) *rest = finite_or_zero(v - Format::decode(half) * unscale);
    return half;
  };
  Floats rest{};
  size_t at = for_vectors(task.count, [&](size_t i) __attribute__((always_inline)) {
    // The next chunk most likely follows: fetched while this one is computed with. Beyond an array nothing happens.
    if (!kResidual && i % kLineFloats == 0) __builtin_prefetch(task.v + i + task.count);
    store_vector(task.to + 2 * i, round(load_floats(task.v + i), &rest));
    if (kResidual) store_floats(task.residual + i, rest);
  });
  Halves half = round(load_some(task.v + at, task.count - at), &rest);
  __builtin_memcpy(task.to + 2 * at, &half, 2 * (task.count - at));
  if (kResidual) store_some(task.residual + at, rest, task.count - at);
}

void encode_halves_any(const HalfEncodeTask& task) {
  bool f16 = task.dtype == DType::kFloat16;
  if (task.residual == nullptr)
    return f16 ? encode_halves_as<Float16, false>(task) : encode_halves_as<BFloat16, false>(task);
  return f16 ? encode_halves_as<Float16, true>(task) : encode_halves_as<BFloat16, true>(task);
}

template <class Format, Arrival kArrival>
void decode_halves_as(const HalfDecodeTask& task) {
  size_t at = for_vectors(task.count, [&](size_t i) __attribute__((always_inline)) {
    arrive<kArrival>(task.x + i, Format::decode(load_vector<Halves>(task.from + 2 * i)) * task.unscale);
  });
  unsigned char some[sizeof(Halves)] = {};
  __builtin_memcpy(some, task.from + 2 * at, 2 * (task.count - at));
  some_arrive<kArrival>(task.x + at, Format::decode(load_vector<Halves>(some)) * task.unscale, task.count - at);
  if (kArrival == Arrival::kStream) stream_fence();
}

template <class Format>
void decode_halves_from(const HalfDecodeTask& task) {
  switch (possible_arrival(task.arrival, task.x)) {
    case Arrival::kStore:
      return decode_halves_as<Format, Arrival::kStore>(task);
    case Arrival::kStream:
      return decode_halves_as<Format, Arrival::kStream>(task);
    case Arrival::kAdd:
      return decode_halves_as<Format, Arrival::kAdd>(task);
  }
}

void decode_halves_any(const HalfDecodeTask& task) {
  if (task.dtype == DType::kFloat16) decode_halves_from<Float16>(task);
  else decode_halves_from<BFloat16>(task);
}

}  // namespace
}  // namespace perseus::kernels

// What one SIMD variant offers to kernels.cc: the same functions, compiled for its instruction set. Thread-safe.
//
// Whatever a variant's .cc defines has internal linkage and it calls no inline function from outside kernels/: the
// linker keeps one copy of an inline function, and might keep the one with instructions this machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/codec_kernels.h"
#include "kernels/kernels.h"
#include "kernels/low_rank.h"

namespace perseus::kernels {

// A checked call of reduce(): n >= 1, count >= 1, divisor >= 1, op one of Sum, Min, Max, Product.
struct ReduceTask {
  ReduceSpec spec;
  unsigned char* dst;
  unsigned char* dst2;
  const unsigned char* const* sources;
  int n;
  size_t count;
  bool stream_dst;
};

// One call of start_sum(), add_to_sum() or finish_sum() for f16 or bf16; dst only counts for the last.
enum class SumPart { kStart, kAdd, kFinish };
struct HalfSumTask {
  SumPart part;
  DType dtype;
  float* sum;
  const unsigned char* x;
  unsigned char* dst;
  size_t count;
};

// ---- one call each of the functions in codec_kernels.h, whose comments say what they mean ---------------------------

struct HalfEncodeTask {
  DType dtype;
  const float* v;
  float scale, unscale;
  size_t count;
  unsigned char* to;
  float* residual;
};

struct HalfDecodeTask {
  DType dtype;
  const unsigned char* from;
  float unscale;
  size_t count;
  float* x;
  Arrival arrival;
};

struct IntegerEncodeTask {
  size_t bits;
  const float* v;
  size_t count;
  unsigned char* scales;
  unsigned char* to;
  float* residual;
};

struct IntegerDecodeTask {
  size_t bits;
  const unsigned char* scales;
  const unsigned char* from;
  size_t count;
  float* x;
  Arrival arrival;
};

struct ExponentEncodeTask {
  bool narrow;
  const float* v;
  size_t rows;
  unsigned char* to;
};

struct ExponentDecodeTask {
  bool narrow;
  const unsigned char* from;
  size_t bytes, rows;
  float* x;
  Arrival arrival;
};

struct CodecKernels {
  uint32_t (*largest_magnitude)(const float* x, size_t count);
  uint32_t (*largest_finite_magnitude)(const float* x, size_t count);
  uint32_t (*add_to_residual)(const float* x, float momentum, float* residual, size_t count);
  void (*encode_halves)(const HalfEncodeTask& task);
  void (*decode_halves)(const HalfDecodeTask& task);
  bool (*encode_integers)(const IntegerEncodeTask& task);
  void (*decode_integers)(const IntegerDecodeTask& task);
  size_t (*encode_exponents)(const ExponentEncodeTask& task);
  size_t (*decode_exponents)(const ExponentDecodeTask& task);
  size_t (*count_at_least)(const float* v, size_t count, uint32_t magnitude);
  size_t (*find_at_least)(const float* v, size_t count, uint32_t magnitude, uint16_t* indices);
  void (*add_at)(float* x, const uint16_t* indices, const float* values, size_t n);
};

// One call of a function in low_rank.h: what it does not name is null.
struct LowRankTask {
  MatrixShape shape;
  size_t rank;
  const float* w;
  const float* q;
  float* p;  // project() writes it
  float* q_out;
  float* out;
  const float* x = nullptr;
  float carry = 1.0F;
};

struct LowRankKernels {
  void (*project)(const LowRankTask& task);
  void (*project_back)(const LowRankTask& task);
  void (*expand)(const LowRankTask& task);
  void (*subtract_product)(const LowRankTask& task);
  void (*advance)(const LowRankTask& task);  // out = carry (out - p q) + x
};

struct Variant {
  const char* name;
  void (*reduce)(const ReduceTask& task);
  void (*copy)(void* dst, const void* src, size_t n, bool stream);
  bool (*has_nan)(DType dtype, const unsigned char* data, size_t count);
  void (*sum_halves)(const HalfSumTask& task);
  CodecKernels codec;
  LowRankKernels low_rank;
};

// The one that kernels.cc has chosen.
const Variant& current_variant();

extern const Variant kPortable;
extern const Variant kAvx2;    // x86-64 only
extern const Variant kAvx512;  // x86-64 only
extern const Variant kNeon;    // aarch64 only

}  // namespace perseus::kernels

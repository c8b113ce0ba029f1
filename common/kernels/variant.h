// What one SIMD variant offers to kernels.cc: the same two functions, compiled for its instruction set. Thread-safe.
//
// Whatever a variant's .cc defines has internal linkage and it calls no inline function from outside kernels/: the
// linker keeps one copy of an inline function, and might keep the one with instructions this machine lacks.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace perseus::kernels {

// A checked call of fold(): n >= 1, count >= 1, divisor >= 1, op one of Sum, Min, Max, Product.
struct FoldTask {
  FoldSpec spec;
  unsigned char* dst;
  unsigned char* dst2;
  const unsigned char* const* sources;
  int n;
  size_t count;
  bool stream_dst;
};

struct Variant {
  const char* name;
  void (*fold)(const FoldTask& task);
  void (*copy)(void* dst, const void* src, size_t n, bool stream);
};

extern const Variant kPortable;
extern const Variant kAvx2;    // x86-64 only
extern const Variant kAvx512;  // x86-64 only
extern const Variant kNeon;    // aarch64 only

}  // namespace perseus::kernels

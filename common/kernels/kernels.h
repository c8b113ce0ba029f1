// Pure functions over arrays: reduce (in rank order), copies, running sums, a search for NaN. SIMD variant chosen
// once at run time; every variant gives the same bits. Thread-safe; pointers need only the alignment of a byte.
#pragma once

#include <cstddef>

#include "base/dtype.h"

namespace perseus::kernels {

// How n operands become one: result = post * reduce(pre * x0, pre * x1, …) evaluated strictly in the order given.
// - f16/bf16 accumulate in f32 and round once, at the end; f32 and f64 accumulate in themselves.
// - Integer sums and products wrap. Factors other than 1 act on integers in double and truncate toward zero, to the
//   nearest limit where the type's range ends and to 0 for NaN (pre before, post after the reduction). `divisor`
//   divides the result of `post` before it is truncated; without `post` the division is exact.
// - For floats `divisor` is merged into `post` as one multiplication by post / divisor rounded to the accumulator type.
// - A NaN result is the one quiet NaN without sign and payload. One operand without factors is copied bit for bit.
// - Min/Max propagate NaN; of equal operands (0 and -0) the first stays.
// - Bool: Sum and Max are or, Min and Product are and; results are 0 or 1; factors are ignored.
struct ReduceSpec {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // Sum, Min, Max, Product; Average is Sum with divisor = number of ranks
  double prescale = 1.0;
  double postscale = 1.0;
  int divisor = 1;  // >= 1
};

// dst[i] = reduction of sources[0][i] … sources[n - 1][i]; n >= 1. dst may equal any source exactly; no other overlap.
// `dst2`, when not null, receives the same values (a peer's window) and may not overlap anything.
// `stream_dst`: dst will not be read soon; store around the cache where that is faster (never where dst is a source).
// The caller's rounding mode and flushing of denormals have no effect. Throws Error(kInvalidArgument) for a spec or an
// n outside these rules.
void reduce(const ReduceSpec& spec, void* dst, void* dst2, const void* const* sources, int n, size_t count,
            bool stream_dst);

// memcpy of n bytes; `stream`: dst will not be read soon, n is a slice of something larger than the caches. Twice as
// fast as memcpy then, unless dst's lines are in the cache because they were just read: those are better overwritten
// there. A thread that sees a release store made after the return sees the streamed stores, too; likewise
// those of reduce.
void copy(void* dst, const void* src, size_t n, bool stream);

// Is any element a NaN? Reads at the speed of memory; false for types that are not floating.
bool has_nan(DType dtype, const void* data, size_t count);

// A running sum of arrays, in the order they come: sum = x, then sum += x, and at the end dst = sum + x. f16 and bf16
// are summed in f32, so that all is rounded once, in finish_sum; other types in themselves. `sum` has count elements of
// sum_size() bytes, aligned to them. dst may equal x; no other overlap.
size_t sum_size(DType dtype);
void start_sum(DType dtype, void* sum, const void* x, size_t count);
void add_to_sum(DType dtype, void* sum, const void* x, size_t count);
void finish_sum(DType dtype, void* dst, const void* sum, const void* x, size_t count);

// "avx512", "avx2", "neon" or "portable": what this process uses (PERSEUS_SIMD forces one, for tests).
const char* variant();
// Choose by name; throws Error(kInvalidArgument) for a name this machine cannot run. Calls under way end as they began.
void select_variant(const char* name);

}  // namespace perseus::kernels

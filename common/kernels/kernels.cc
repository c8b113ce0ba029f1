// Chooses the SIMD variant and guards its calls: arguments checked, floating-point mode the default one. Thread-safe.
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/float_mode.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports() knows it.
bool has_f16c() {
  constexpr unsigned kF16c = 1U << 29;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c(); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif
bool always() { return true; }

struct Candidate {
  const Variant* variant;
  bool (*runs_here)();
};

// Best first.
constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {&kAvx512, has_avx512},
    {&kAvx2, has_avx2},
#elif defined(__aarch64__)
    {&kNeon, always},
#endif
    {&kPortable, always},
};

const Variant* best() {
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here()) return candidate.variant;
  }
  return &kPortable;
}

// Not a mutable global of a context: it changes speed, never results. So whoever reads the old choice a little longer
// does no harm, and variants are constants: nothing needs an order.
std::atomic<const Variant*>& choice() {
  static std::atomic<const Variant*> variant{best()};
  return variant;
}

const Variant* chosen() { return choice().load(std::memory_order_relaxed); }
void choose(const Variant* variant) { choice().store(variant, std::memory_order_relaxed); }

void check(const ReduceSpec& spec, int n) {
  bool known = spec.op == ReduceOp::kSum || spec.op == ReduceOp::kMin || spec.op == ReduceOp::kMax ||
               spec.op == ReduceOp::kProduct;
  if (!known) {
    fail(ErrorKind::kInvalidArgument, "[kernels] reduce got op " + std::to_string(static_cast<int>(spec.op)) +
                                          ", expected Sum, Min, Max or Product (Average is Sum with a divisor)");
  }
  if (static_cast<int>(spec.dtype) >= kDTypeCount) {
    fail(ErrorKind::kInvalidArgument, "[kernels] reduce got unknown dtype " +
                                          std::to_string(static_cast<int>(spec.dtype)) + ", expected 0 to " +
                                          std::to_string(kDTypeCount - 1));
  }
  if (n < 1 || spec.divisor < 1) {
    fail(ErrorKind::kInvalidArgument, "[kernels] reduce got " + std::to_string(n) + " sources and divisor " +
                                          std::to_string(spec.divisor) + ", expected at least 1 each");
  }
}

}  // namespace

const Variant& current_variant() { return *chosen(); }

void reduce(const ReduceSpec& spec, void* dst, void* dst2, const void* const* sources, int n, size_t count,
            bool stream_dst) {
  check(spec, n);
  if (count == 0) return;
  DefaultFloatMode mode;
  ReduceSpec bits;  // one operand and no factors: a copy, NaN payloads included
  bits.dtype = DType::kUInt8;
  bool as_bits =
      n == 1 && spec.dtype != DType::kBool && spec.prescale == 1.0 && spec.postscale == 1.0 && spec.divisor == 1;
  if (as_bits) count *= dtype_size(spec.dtype);
  if (as_bits && dst2 == nullptr) {
    if (dst != sources[0]) copy(dst, sources[0], count, stream_dst);
    return;
  }
  chosen()->reduce(ReduceTask{as_bits ? bits : spec, static_cast<unsigned char*>(dst),
                              static_cast<unsigned char*>(dst2), reinterpret_cast<const unsigned char* const*>(sources),
                              n, count, stream_dst});
}

void copy(void* dst, const void* src, size_t n, bool stream) {
  if (n != 0) chosen()->copy(dst, src, n, stream);
}

bool has_nan(DType dtype, const void* data, size_t count) {
  return count != 0 && chosen()->has_nan(dtype, static_cast<const unsigned char*>(data), count);
}

namespace {

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

void sum_halves(SumPart part, DType dtype, void* dst, void* sum, const void* x, size_t count) {
  DefaultFloatMode mode;
  chosen()->sum_halves(HalfSumTask{part, dtype, static_cast<float*>(sum), static_cast<const unsigned char*>(x),
                                   static_cast<unsigned char*>(dst), count});
}

void add(DType dtype, void* dst, const void* sum, const void* x, size_t count) {
  ReduceSpec spec;
  spec.dtype = dtype;
  const void* sources[] = {sum, x};
  reduce(spec, dst, nullptr, sources, 2, count, false);
}

}  // namespace

size_t sum_size(DType dtype) { return is_half(dtype) ? sizeof(float) : dtype_size(dtype); }

void start_sum(DType dtype, void* sum, const void* x, size_t count) {
  if (is_half(dtype)) sum_halves(SumPart::kStart, dtype, nullptr, sum, x, count);
  else copy(sum, x, count * dtype_size(dtype), false);
}

void add_to_sum(DType dtype, void* sum, const void* x, size_t count) {
  if (is_half(dtype)) sum_halves(SumPart::kAdd, dtype, nullptr, sum, x, count);
  else add(dtype, sum, sum, x, count);
}

void finish_sum(DType dtype, void* dst, const void* sum, const void* x, size_t count) {
  // What is finished is only read.
  if (is_half(dtype)) sum_halves(SumPart::kFinish, dtype, dst, const_cast<void*>(sum), x, count);
  else add(dtype, dst, sum, x, count);
}

const char* variant() { return chosen()->name; }

void select_variant(const char* name) {
  if (std::strcmp(name, "auto") == 0) {
    choose(best());
    return;
  }
  std::string here = "auto";
  for (const Candidate& candidate : kCandidates) {
    if (!candidate.runs_here()) continue;
    here = here + ", " + candidate.variant->name;
    if (std::strcmp(name, candidate.variant->name) == 0) {
      choose(candidate.variant);
      return;
    }
  }
  fail(ErrorKind::kInvalidArgument,
       "[kernels] SIMD variant '" + std::string(name) + "' does not run on this machine, expected one of: " + here);
}

}  // namespace perseus::kernels

// From a ReduceTask to the loops for its element type and reduction. Internal linkage, see variant.h; no threads.
#pragma once

#include <type_traits>

#include "kernels/reduce_loops.h"
#include "kernels/reduce_scaled_ints.h"

namespace perseus::kernels {
namespace {

template <class Type>
void reduce_as(const ReduceTask& task, const Factors& factors) {
  switch (task.spec.op) {
    case ReduceOp::kMin:
      return Reduction<Type, MinOf>(task, factors).run();
    case ReduceOp::kMax:
      return Reduction<Type, MaxOf>(task, factors).run();
    case ReduceOp::kProduct:
      return Reduction<Type, ProductOf>(task, factors).run();
    default:
      return Reduction<Type, SumOf>(task, factors).run();
  }
}

template <class Format>
void reduce_floats(const ReduceTask& task) {
  Factors factors{task.spec.prescale, task.spec.postscale / task.spec.divisor};
  if (factors.pre == 1.0 && factors.post == 1.0) {
    reduce_as<FloatType<Format, false>>(task, factors);
  } else {
    reduce_as<FloatType<Format, true>>(task, factors);
  }
}

template <class T>
void reduce_ints(const ReduceTask& task) {
  using Wrapping = IntType<std::make_unsigned_t<T>>;
  constexpr Factors kNone{1.0, 1.0};
  if (task.spec.prescale != 1.0 || task.spec.postscale != 1.0 || task.spec.divisor != 1) {
    return ScaledIntReduction<T>(task).run();
  }
  switch (task.spec.op) {
    case ReduceOp::kMin:
      return Reduction<IntType<T>, MinOf>(task, kNone).run();
    case ReduceOp::kMax:
      return Reduction<IntType<T>, MaxOf>(task, kNone).run();
    case ReduceOp::kProduct:
      return Reduction<Wrapping, ProductOf>(task, kNone).run();
    default:
      return Reduction<Wrapping, SumOf>(task, kNone).run();
  }
}

void reduce_bools(const ReduceTask& task) {
  constexpr Factors kNone{1.0, 1.0};
  if (task.spec.op == ReduceOp::kSum || task.spec.op == ReduceOp::kMax) {
    Reduction<BoolType, Or>(task, kNone).run();
  } else {
    Reduction<BoolType, And>(task, kNone).run();
  }
}

void reduce_any(const ReduceTask& task) {
  switch (task.spec.dtype) {
    case DType::kFloat16:
      return reduce_floats<Float16>(task);
    case DType::kBFloat16:
      return reduce_floats<BFloat16>(task);
    case DType::kFloat32:
      return reduce_floats<Float32>(task);
    case DType::kFloat64:
      return reduce_floats<Float64>(task);
    case DType::kUInt8:
      return reduce_ints<uint8_t>(task);
    case DType::kInt8:
      return reduce_ints<int8_t>(task);
    case DType::kInt16:
      return reduce_ints<int16_t>(task);
    case DType::kInt32:
      return reduce_ints<int32_t>(task);
    case DType::kInt64:
      return reduce_ints<int64_t>(task);
    case DType::kBool:
      return reduce_bools(task);
  }
}

}  // namespace
}  // namespace perseus::kernels

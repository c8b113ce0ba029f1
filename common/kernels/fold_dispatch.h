// From a FoldTask to the loops for its element type and reduction. Internal linkage, see variant.h; no threads.
#pragma once

#include <type_traits>

#include "kernels/fold_loops.h"
#include "kernels/fold_scaled_ints.h"

namespace perseus::kernels {
namespace {

template <class Type>
void fold_as(const FoldTask& task, const Factors& factors) {
  switch (task.spec.op) {
    case ReduceOp::kMin:
      return Fold<Type, MinOf>(task, factors).run();
    case ReduceOp::kMax:
      return Fold<Type, MaxOf>(task, factors).run();
    case ReduceOp::kProduct:
      return Fold<Type, ProductOf>(task, factors).run();
    default:
      return Fold<Type, SumOf>(task, factors).run();
  }
}

template <class Format>
void fold_floats(const FoldTask& task) {
  Factors factors{task.spec.prescale, task.spec.postscale / task.spec.divisor};
  if (factors.pre == 1.0 && factors.post == 1.0) {
    fold_as<FloatType<Format, false>>(task, factors);
  } else {
    fold_as<FloatType<Format, true>>(task, factors);
  }
}

template <class T>
void fold_ints(const FoldTask& task) {
  using Wrapping = IntType<std::make_unsigned_t<T>>;
  constexpr Factors kNone{1.0, 1.0};
  if (task.spec.prescale != 1.0 || task.spec.postscale != 1.0 || task.spec.divisor != 1) {
    return ScaledIntFold<T>(task).run();
  }
  switch (task.spec.op) {
    case ReduceOp::kMin:
      return Fold<IntType<T>, MinOf>(task, kNone).run();
    case ReduceOp::kMax:
      return Fold<IntType<T>, MaxOf>(task, kNone).run();
    case ReduceOp::kProduct:
      return Fold<Wrapping, ProductOf>(task, kNone).run();
    default:
      return Fold<Wrapping, SumOf>(task, kNone).run();
  }
}

void fold_bools(const FoldTask& task) {
  constexpr Factors kNone{1.0, 1.0};
  if (task.spec.op == ReduceOp::kSum || task.spec.op == ReduceOp::kMax) {
    Fold<BoolType, Or>(task, kNone).run();
  } else {
    Fold<BoolType, And>(task, kNone).run();
  }
}

void fold_any(const FoldTask& task) {
  switch (task.spec.dtype) {
    case DType::kFloat16:
      return fold_floats<Float16>(task);
    case DType::kBFloat16:
      return fold_floats<BFloat16>(task);
    case DType::kFloat32:
      return fold_floats<Float32>(task);
    case DType::kFloat64:
      return fold_floats<Float64>(task);
    case DType::kUInt8:
      return fold_ints<uint8_t>(task);
    case DType::kInt8:
      return fold_ints<int8_t>(task);
    case DType::kInt16:
      return fold_ints<int16_t>(task);
    case DType::kInt32:
      return fold_ints<int32_t>(task);
    case DType::kInt64:
      return fold_ints<int64_t>(task);
    case DType::kBool:
      return fold_bools(task);
  }
}

}  // namespace
}  // namespace perseus::kernels

// Element types and reductions every layer speaks of; values are part of the C ABI. No threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus {

// Same numbers as enum perseus_dtype.
enum class DType : uint8_t {
  kFloat16 = 0,
  kBFloat16 = 1,
  kFloat32 = 2,
  kFloat64 = 3,
  kUInt8 = 4,
  kInt8 = 5,
  kInt16 = 6,
  kInt32 = 7,
  kInt64 = 8,
  kBool = 9,
};
constexpr int kDTypeCount = 10;

// Same numbers as Horovod's ReduceOp and enum perseus_reduce_op.
enum class ReduceOp : uint8_t { kAverage = 0, kSum = 1, kAdasum = 2, kMin = 3, kMax = 4, kProduct = 5 };

constexpr size_t dtype_size(DType dtype) {
  constexpr size_t kSizes[kDTypeCount] = {2, 2, 4, 8, 1, 1, 2, 4, 8, 1};
  return kSizes[static_cast<int>(dtype)];
}

// "float32": the lower-case names Horovod's messages use.
constexpr const char* dtype_name(DType dtype) {
  constexpr const char* kNames[kDTypeCount] = {"float16", "bfloat16", "float32", "float64", "uint8",
                                               "int8",    "int16",    "int32",   "int64",   "bool"};
  return kNames[static_cast<int>(dtype)];
}

constexpr bool dtype_is_float(DType dtype) { return static_cast<int>(dtype) <= 3; }

constexpr const char* reduce_op_name(ReduceOp op) {
  constexpr const char* kNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  return kNames[static_cast<int>(op)];
}

}  // namespace perseus

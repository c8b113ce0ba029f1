// TensorFlow's data types as the core's.
#pragma once

#include "perseus/perseus.h"
#include "tf_c_api.h"

namespace perseus::tensorflow {

// False for a type that cannot be sent. Ops that do not reduce also take types that the core cannot reduce.
inline bool core_dtype(int dtype, perseus_kind kind, perseus_dtype* found) {
  switch (dtype) {
    case TF_HALF:
      *found = PERSEUS_FLOAT16;
      return true;
    case TF_BFLOAT16:
      *found = PERSEUS_BFLOAT16;
      return true;
    case TF_FLOAT:
      *found = PERSEUS_FLOAT32;
      return true;
    case TF_DOUBLE:
      *found = PERSEUS_FLOAT64;
      return true;
    case TF_UINT8:
      *found = PERSEUS_UINT8;
      return true;
    case TF_INT8:
      *found = PERSEUS_INT8;
      return true;
    case TF_INT16:
      *found = PERSEUS_INT16;
      return true;
    case TF_UINT16:
      *found = PERSEUS_INT16;
      return kind == PERSEUS_ALLGATHER || kind == PERSEUS_BROADCAST || kind == PERSEUS_ALLTOALL;
    case TF_INT32:
      *found = PERSEUS_INT32;
      return true;
    case TF_INT64:
      *found = PERSEUS_INT64;
      return true;
    case TF_BOOL:
      *found = PERSEUS_BOOL;
      return true;
    default:
      return false;
  }
}

}  // namespace perseus::tensorflow

// The functions that programs of XLA call by name, and their calling conventions.
//
// XLA's interface for such functions has changed: targets_ffi.cc is for a TensorFlow that ships xla/ffi/api/ffi.h,
// targets_status.cc for older ones. Only one of them is compiled.
#pragma once

#include <string>

namespace perseus::tensorflow::xla {

inline constexpr const char* kStart = "perseus_xla_start";  // tensors -> call, an int64; with a plan's text
inline constexpr const char* kWait = "perseus_xla_wait";    // call -> call
inline constexpr const char* kTake = "perseus_xla_take";    // call -> the results, a tuple
inline constexpr const char* kAsk = "perseus_xla_ask";      // nothing -> an int32; with "fact group" as text

// xla::CustomCallApiVersion.
int interface_version();

// A text in the form that a program needs: without quotes and backslashes.
std::string as_argument(const std::string& text);

}  // namespace perseus::tensorflow::xla

// The functions that programs of XLA call by name, and how a program has to call them.
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

// A text as a program has to have it: one without quotes or backslashes.
std::string as_argument(const std::string& text);

}  // namespace perseus::tensorflow::xla

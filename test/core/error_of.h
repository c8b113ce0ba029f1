// The errors that calls are expected to throw.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"

namespace perseus {

// What a call throws; fails the test when it throws nothing.
template <class Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorKind::kInternal, "no error");
}

inline bool contains(const Error& error, const std::string& part) {
  return std::string(error.what()).find(part) != std::string::npos;
}

}  // namespace perseus

// The SIMD variants that can be tested here.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/kernels.h"

namespace perseus_test {

inline std::vector<std::string> variants_here() {
  std::vector<std::string> names;
  for (const char* name : {"portable", "neon", "avx2", "avx512"}) {
    try {
      perseus::kernels::select_variant(name);
      names.push_back(name);
    } catch (const perseus::Error&) {
    }
  }
  perseus::kernels::select_variant("auto");
  return names;
}

}  // namespace perseus_test

// Where a buffer lies. Plain value.
#pragma once

#include <cstdint>

namespace perseus {

struct Device {
  enum class Kind : uint8_t { kCpu, kCuda };
  Kind kind = Kind::kCpu;
  int index = 0;  // among those of its kind that the process sees

  bool operator==(const Device& other) const { return kind == other.kind && index == other.index; }
  bool operator!=(const Device& other) const { return !(*this == other); }
};

}  // namespace perseus

// Views of raw memory and lists of them. No ownership, no threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus {

using Byte = unsigned char;

struct Span {
  Byte* data = nullptr;
  size_t size = 0;
  explicit operator bool() const { return data != nullptr; }
};

struct ConstSpan {
  const Byte* data = nullptr;
  size_t size = 0;
  ConstSpan() = default;
  ConstSpan(const void* p, size_t n) : data(static_cast<const Byte*>(p)), size(n) {}
  ConstSpan(Span s) : data(s.data), size(s.size) {}  // NOLINT: a view of a view
  explicit operator bool() const { return data != nullptr; }
};

}  // namespace perseus

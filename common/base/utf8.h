// Texts in UTF-8 for which there is only so much room. Thread-safe.
#pragma once

#include <cstddef>
#include <string>

namespace perseus {

// How many bytes of the text fit into `most` without a part of a character at their end.
inline size_t fitting_characters(const std::string& text, size_t most) {
  if (text.size() <= most) return text.size();
  constexpr size_t kMostFollowers = 3;
  const auto follows = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
  size_t size = most;
  while (size > 0 && most - size < kMostFollowers && follows(size)) --size;
  return size;
}

}  // namespace perseus

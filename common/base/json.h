// JSON texts: the one thing that is not obvious about writing them.
#pragma once

#include <string>

namespace perseus {

// The text in quotes, with everything escaped that JSON wants escaped. Bytes above 127 are taken for UTF-8.
inline std::string json_string(const std::string& text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += "\\u00";
      quoted += kHex[c >> 4];
      quoted += kHex[c & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace perseus

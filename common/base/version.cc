// The release comes from CMakeLists.txt, the hash from source_hash.cmake.
#include "base/version.h"

#include <algorithm>
#include <cctype>

#include "perseus_source_hash.h"

namespace perseus {

const std::string& this_version() {
  static_assert(sizeof PERSEUS_VERSION "+" PERSEUS_SOURCE_HASH <= kVersionField, "a version fits its field");
  // Never destroyed: threads of a store may outlive static destruction.
  static const auto* const version = new std::string(PERSEUS_VERSION "+" PERSEUS_SOURCE_HASH);
  return *version;
}

std::string version_field(const std::string& version) {
  std::string field = version.substr(0, kVersionField);
  field.resize(kVersionField, '\0');
  return field;
}

std::string version_of_field(const std::string& field) {
  const std::string version = field.substr(0, field.find('\0'));
  const bool text = std::all_of(version.begin(), version.end(), [](unsigned char c) { return std::isgraph(c) != 0; });
  return text && !version.empty() ? version : "of an unknown version";
}

}  // namespace perseus

// Which Perseus this is, for ranks to compare. Constant; thread-safe.
#pragma once

#include <cstddef>
#include <string>

namespace perseus {

// The release and a hash of the core's sources, such as "0.1.0+3f2a9c1d0b7e". What ranks say to each other is defined
// by those sources, so equal versions speak one protocol, whatever compiler and processor they were built with and for.
const std::string& this_version();

// In messages of fixed size: the text, padded with zeros.
constexpr size_t kVersionField = 32;
std::string version_field(const std::string& version);
// What a peer says that it is, for an error message.
std::string version_of_field(const std::string& field);

}  // namespace perseus

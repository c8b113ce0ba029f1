// Which network interfaces a user asks for, by PERSEUS_GLOO_NETWORK_INTERFACE or what stands in for it. The one place
// that reads these variables' syntax. Immutable: thread-safe.
#pragma once

#include <string>
#include <vector>

#include "base/config.h"

namespace perseus {

// Names separated by commas, with spaces or nothing between two of them. NCCL_SOCKET_IFNAME has a syntax of its own:
// every entry is how a name begins, after a leading '=' a whole name; after a leading '^' what is not to be used.
class InterfaceChoice {
 public:
  explicit InterfaceChoice(const Config& config);

  // Are interfaces named, all of which are used at once? Else they are chosen automatically, among those it allows.
  bool names_some() const { return !entries_.empty() && !excludes_; }
  // Are there more interfaces that an entry may mean than the one of that name?
  bool by_prefix() const { return prefixes_; }
  // In the order they are given, each once.
  const std::vector<std::string>& entries() const { return entries_; }
  bool matches(const std::string& entry, const std::string& interface) const;
  bool allows(const std::string& interface) const;
  // Which variable was given, and how.
  const std::string& variable() const { return variable_; }
  const std::string& value() const { return value_; }

 private:
  std::string variable_, value_;
  std::vector<std::string> entries_;
  bool prefixes_ = false, excludes_ = false;
};

}  // namespace perseus

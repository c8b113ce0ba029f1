// Reads the lists.
#include "net/interface_choice.h"

#include <algorithm>
#include <sstream>

namespace perseus {

InterfaceChoice::InterfaceChoice(const Config& config)
    : variable_(config.source(Var::kInterfaces)), value_(config.text(Var::kInterfaces)) {
  std::string list = value_;
  if (variable_ == "NCCL_SOCKET_IFNAME") {
    const auto take = [&list](char mark) {
      const bool there = !list.empty() && list[0] == mark;
      if (there) list.erase(0, 1);
      return there;
    };
    excludes_ = take('^');
    prefixes_ = !take('=');
  }
  std::stringstream stream(list);
  for (std::string entry; std::getline(stream, entry, ',');) {
    entry.erase(0, entry.find_first_not_of(" \t"));
    entry.erase(entry.find_last_not_of(" \t") + 1);
    if (!entry.empty() && std::find(entries_.begin(), entries_.end(), entry) == entries_.end())
      entries_.push_back(entry);
  }
}

bool InterfaceChoice::matches(const std::string& entry, const std::string& interface) const {
  return prefixes_ ? interface.compare(0, entry.size(), entry) == 0 : interface == entry;
}

bool InterfaceChoice::allows(const std::string& interface) const {
  const bool listed = std::any_of(entries_.begin(), entries_.end(),
                                  [&](const std::string& entry) { return matches(entry, interface); });
  return entries_.empty() || listed != excludes_;
}

}  // namespace perseus

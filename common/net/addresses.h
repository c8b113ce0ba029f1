// Which of this host's addresses others can reach. Thread-safe: stateless.
#pragma once

#include <string>

#include "net/interface_choice.h"

namespace perseus {

std::string host_name();
// The IPv4 address of a network interface; Error(kInvalidArgument) naming those there are without one.
std::string interface_address(const std::string& name);
// The same of the first interface that is named, whose names_some() must hold.
std::string interface_address(const InterfaceChoice& choice);
// The address from which this host would talk to `host`; "" without a name or route.
std::string source_address(const std::string& host);
// Is `host` a name or number of this very host? `*address` becomes its number then.
bool is_own_address(const std::string& host, std::string* address);
bool is_loopback(const std::string& host);

}  // namespace perseus

// Which of this host's addresses others can reach. Thread-safe: stateless.
#pragma once

#include <string>

#include "net/interface_choice.h"

namespace perseus {

std::string host_name();
// That of the first interface which is named and has one: IPv4, else IPv6. names_some() must hold. Throws as
// usable_addresses() does.
std::string interface_address(const InterfaceChoice& choice);
// The address from which this host would talk to `host`; "" without a name or route.
std::string source_address(const std::string& host);
// Is `host` a name or number of this very host? `*address` becomes its number then.
bool is_own_address(const std::string& host, std::string* address);
bool is_loopback(const std::string& host);

}  // namespace perseus

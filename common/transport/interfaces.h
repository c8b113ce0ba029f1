// The network interfaces of this host and which of them ranks may talk over. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "rendezvous/socket.h"

namespace perseus {

struct InterfaceAddress {
  std::string interface;
  SocketAddress address;  // port 0
  int prefix = 0;         // bits that name the subnet
  bool loopback = false;
};

// Addresses of interfaces that are up, without link-local ones. `names` (separated by commas): those interfaces alone,
// in that order; an interface that does not exist or has no address is Error(kInvalidArgument) naming it and those
// there are. "": every one but what container engines make for themselves, unless nothing else is there; loopback last.
std::vector<InterfaceAddress> usable_addresses(const std::string& names);

// Are `a` and `b` in one subnet of `prefix` bits?
bool same_subnet(const SocketAddress& a, const SocketAddress& b, int prefix);

}  // namespace perseus

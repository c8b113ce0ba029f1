// The network interfaces of this host and which of them ranks may talk over. Thread-safe.
#pragma once

#include <string>
#include <vector>

#include "net/interface_choice.h"
#include "net/socket.h"

namespace perseus {

struct InterfaceAddress {
  std::string interface;
  SocketAddress address;  // port 0
  int prefix = 0;         // bits that name the subnet
  bool loopback = false;
};

// Addresses of interfaces that are up, without link-local ones. Where some are named: of those alone, in that order; an
// entry that means none, or none with an address, is Error(kInvalidArgument) naming it and the interfaces there are.
// Else: of every one that is allowed but what container engines make for themselves, unless nothing else is there;
// loopback last.
std::vector<InterfaceAddress> usable_addresses(const InterfaceChoice& choice);
// How many interfaces are used at once: 1 where they are chosen automatically.
int interfaces_at_once(const InterfaceChoice& choice);

// Has this host an adapter for RDMA (InfiniBand, RoCE, EFA)?
bool has_rdma();

// Are `a` and `b` in one subnet of `prefix` bits?
bool same_subnet(const SocketAddress& a, const SocketAddress& b, int prefix);

}  // namespace perseus

// What this host is called: ranks share memory, and count as local to each other, where these agree. Thread-safe.
#pragma once

#include <string>

namespace perseus {

// Boot id and network namespace: equal exactly where abstract UNIX sockets of one reach the other. Without a boot id,
// the host's name stands in for it.
std::string host_identity();

}  // namespace perseus

// Where a rank can be reached: what it publishes through the Store, and in which order others try it. Thread-safe:
// values and pure functions.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "net/interfaces.h"
#include "net/socket.h"

namespace perseus {

struct TcpEndpoint {
  std::string host;     // host_identity()
  bool chosen = false;  // the user named the interfaces: use these addresses and no other, several at once
  std::vector<InterfaceAddress> addresses;  // with ports

  std::string encode() const;
  // Throws Error(kIo) naming `rank` when the text is none of ours.
  static TcpEndpoint decode(const std::string& text, int rank);
};

// Addresses of `theirs` that `own` should try, best first.
std::vector<SocketAddress> candidates(const TcpEndpoint& own, const TcpEndpoint& theirs);

// (own, their) address for the data connections of stream 0, 1, …, taken in turn. Empty unless both sides chose
// interfaces and there is more than one pair: then the control connection's address serves them all.
std::vector<std::pair<SocketAddress, SocketAddress>> stripes(const TcpEndpoint& own, const TcpEndpoint& theirs);

}  // namespace perseus

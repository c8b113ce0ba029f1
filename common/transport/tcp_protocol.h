// What two ranks say before a TCP connection carries anything. Numbers are little-endian. Thread-safe: pure functions.
//
// The higher rank connects to the lower one, which listens (net/handshake.h).
//   control connection = opening opening answer verdict frame*   ; the connector opens first
//   data connection = ticket welcome byte*
//   welcome   = 1:u8               ; the listener's; if the connection closes before it, the connector tries again
//   frame     = size:u32 byte* code:u64   ; size <= kMaxControlText; 0 = a heartbeat, else a control message
// Both sides may send frames as soon as they have sent or seen the verdict. The session of the control connection
// makes the tickets of the pair's data connections, which so cost no further round trip, and the keys of the codes
// behind the frames and behind what control streams carry (net/message_check.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "net/handshake.h"
#include "topology/world.h"

namespace perseus::tcp_protocol {

constexpr uint32_t kMagic = 0x50435450;      // "PTCP", of control connections
constexpr uint32_t kDataMagic = 0x44435450;  // "PTCD"
constexpr uint32_t kFormat = 3;
constexpr size_t kMaxControlText = 1024;
constexpr const char* kControl = "control";  // the connection's name in message_key(); a channel's is its number
constexpr char kWelcome = 1;

// What this rank says on a connection of the kind `magic`, without a nonce.
inline Opening opening_of(const World& world, uint32_t magic, uint64_t channel = 0) {
  return Opening{magic, kFormat, world.version, world.epoch, world.rank, channel, ""};
}

}  // namespace perseus::tcp_protocol

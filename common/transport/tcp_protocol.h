// What two ranks say before a TCP connection carries anything. Numbers are little-endian. Thread-safe: pure functions.
//
// The higher rank connects to the lower one (the acceptor).
//   control connection = hello(side, nonce) challenge answer verdict frame*
//   data connection = hello(data, proof) welcome byte*
//   hello     = magic:u32 version:32B purpose:u32 epoch:u32 rank:u32 group:u32 stream:u32 (nonce | proof):32B
//   challenge = nonce:32B                                 ; the acceptor's
//   answer    = proof:32B                                 ; the connector knows the secret, …
//   verdict   = proof:32B                                 ; … and so does the acceptor
//   welcome   = 1:u8               ; the acceptor's; if the connection closes before it, the connector tries again
//   frame     = size:u32 byte*     ; size <= kMaxControlText; 0 = a heartbeat, else a control message
// Both sides may send frames as soon as they have sent or seen the verdict. Every proof covers version, job, epoch,
// both ranks and both nonces; that of a data connection the nonces of the control connection and the channel.
#pragma once

#include <string>

#include "net/auth.h"
#include "transport/transport.h"

namespace perseus::tcp_protocol {

constexpr uint32_t kMagic = 0x50435450;  // "PTCP"
constexpr size_t kNonceSize = 32;
constexpr size_t kProofSize = 32;
constexpr size_t kHelloSize = 6 * 4 + kVersionField + 32;
constexpr size_t kMaxControlText = 1024;
constexpr char kWelcome = 1;

enum class Purpose : uint32_t { kSide = 1, kData = 2 };

struct Hello {
  std::string version = this_version();
  Purpose purpose = Purpose::kSide;
  uint32_t epoch = 0;
  int rank = 0;
  Channel channel;
  std::string tail;  // nonce or proof

  std::string encode() const;
  // "" when the bytes (kHelloSize of them) are a hello of the version `expected`, else what is wrong with them.
  std::string decode(const std::string& bytes, const std::string& expected);
};

// The ends of one pair's control connection and the nonces that they drew.
struct SideKeys {
  int connector = 0, acceptor = 0;
  std::string connector_nonce, acceptor_nonce;
};

enum class Claim { kConnector, kAcceptor, kData };

std::string proof_of(Claim claim, const World& world, const SideKeys& keys, Channel channel = {});
bool proof_is_good(const std::string& proof, Claim claim, const World& world, const SideKeys& keys,
                   Channel channel = {});

}  // namespace perseus::tcp_protocol

// Encoding of hellos and what proofs are made over.
#include "transport/tcp_protocol.h"

#include "base/little_endian.h"

namespace perseus::tcp_protocol {
namespace {

std::string statement(const World& world, const SideKeys& keys, Channel channel) {
  std::string text = version_field(world.version);
  for (const uint32_t number : {world.epoch, static_cast<uint32_t>(keys.connector),
                                static_cast<uint32_t>(keys.acceptor), channel.group, channel.stream})
    put_u32(&text, number);
  return text;
}

const char* label(Claim claim) {
  switch (claim) {
    case Claim::kConnector:
      return "perseus tcp connector";
    case Claim::kAcceptor:
      return "perseus tcp acceptor";
    case Claim::kData:
      break;
  }
  return "perseus tcp data";
}

}  // namespace

std::string Hello::encode() const {
  std::string bytes;
  put_u32(&bytes, kMagic);
  bytes += version_field(version);
  for (const uint32_t number :
       {static_cast<uint32_t>(purpose), epoch, static_cast<uint32_t>(rank), channel.group, channel.stream})
    put_u32(&bytes, number);
  return bytes + tail;
}

std::string Hello::decode(const std::string& bytes, const std::string& expected) {
  if (get_u32(bytes.data()) != kMagic) return "it did not send the hello of a rank";
  version = version_of_field(bytes.substr(4, kVersionField));
  const char* const numbers = bytes.data() + 4 + kVersionField;
  if (version != expected)
    return "it runs Perseus " + version + ", expected " + expected + ": install the same Perseus on every host";
  const uint32_t kind = get_u32(numbers), sender = get_u32(numbers + 8);
  if (kind != static_cast<uint32_t>(Purpose::kSide) && kind != static_cast<uint32_t>(Purpose::kData))
    return "its hello has no known purpose";
  if (sender > INT32_MAX) return "its hello names no rank";
  purpose = static_cast<Purpose>(kind);
  epoch = get_u32(numbers + 4);
  rank = static_cast<int>(sender);
  channel = Channel{get_u32(numbers + 12), get_u32(numbers + 16)};
  tail = bytes.substr(kHelloSize - kNonceSize);
  return "";
}

std::string proof_of(Claim claim, const World& world, const SideKeys& keys, Channel channel) {
  const Digest digest = prove(world.secret, {label(claim), world.job, statement(world, keys, channel),
                                             keys.connector_nonce, keys.acceptor_nonce});
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

bool proof_is_good(const std::string& proof, Claim claim, const World& world, const SideKeys& keys, Channel channel) {
  return proof_holds(
      proof, world.secret,
      {label(claim), world.job, statement(world, keys, channel), keys.connector_nonce, keys.acceptor_nonce});
}

}  // namespace perseus::tcp_protocol

// By which transport bytes reach a rank, and what each is called. Plain values; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus {

// kNone: the rank itself, or one that no transport reaches. Adding a transport adds its name to the table below.
enum class TransportKind : uint8_t { kNone, kMem, kShm, kTcp };

constexpr const char* kTransportNames[] = {"none", "mem", "shm", "tcp"};
constexpr TransportKind kTransportKinds[] = {TransportKind::kNone, TransportKind::kMem, TransportKind::kShm,
                                             TransportKind::kTcp};
static_assert(sizeof kTransportNames / sizeof *kTransportNames == sizeof kTransportKinds / sizeof *kTransportKinds,
              "every transport has a name");

constexpr const char* transport_name(TransportKind kind) { return kTransportNames[static_cast<size_t>(kind)]; }

// A set of transports has one bit for each; that of kNone is empty.
constexpr uint8_t transport_bit(TransportKind kind) {
  return kind == TransportKind::kNone ? uint8_t{0} : static_cast<uint8_t>(1U << (static_cast<unsigned>(kind) - 1));
}

}  // namespace perseus

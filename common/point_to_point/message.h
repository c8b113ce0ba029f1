// What two ranks that send to each other put on their link: a header, then as many bytes as it says. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "transport/transport.h"

namespace perseus {

// Of no process set: these are numbered from 0.
constexpr Channel kPointToPointChannel{UINT32_MAX, 0};

// A message up to this size travels with its announcement, while the receiver holds no more than kMostHeld of them for
// the sender. Larger ones would be copied twice for less than the round trip takes that this saves.
constexpr size_t kMostEager = 4 * 1024;
constexpr size_t kMostHeld = 64 * 1024;

enum class PointToPointType : uint32_t {
  kAnnounce = 1,  // the sender has a message of `bytes` with `tag`; all of it follows, or nothing
  kGo = 2,        // its receiver has a place for it; ends the message if all of it came along
  kRefuse = 3,    // the receive that it met has room for `bytes` instead: both fail
  kPiece = 4,     // the next `length` bytes of a message that may go
  kBye = 5,       // the sender shuts down, and this is its last one
};

struct PointToPointHeader {
  uint32_t magic = 0;
  uint32_t epoch = 0;
  PointToPointType type = PointToPointType::kAnnounce;
  uint32_t length = 0;  // of what follows the header
  uint64_t id = 0;      // of the message, which its sender counts on this link: 1, 2, …
  int64_t tag = 0;
  uint64_t bytes = 0;
};
static_assert(sizeof(PointToPointHeader) == 40 && std::is_trivially_copyable_v<PointToPointHeader>, "it has no gaps");

}  // namespace perseus

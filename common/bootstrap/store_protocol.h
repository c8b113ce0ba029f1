// What store server and client say to each other. Numbers are little-endian.
//
//   connection = opening opening answer verdict request*   ; net/handshake.h; the server opens
//   request    = size:u32 op:u32 key_size:u32 key body code   ; size: from op to body; one at a time
//   body       = value | *number                 ; of set | of get_all and get_present, ascending; else empty
//   reply      = size:u32 value code | *entry    ; to set: empty; to get: once the key exists | one for each number
//   entry      = number:u32 size:u32 value code  ; of key followed by the number in decimal; to get_all: once that
//                                                ; exists; to get_present: at once, size kAbsent where it does not
//   code       = u64                             ; of what comes before it in the message; net/message_check.h
//
// Openings name no job, epoch 0 and rank 0, since a store serves all of them. `format` numbers this grammar. It changes
// more seldom than what ranks say to each other, so that ranks of different versions of Perseus can meet here and tell
// each other which they are (api/context.cc). The grammar may change only together with the number, and the beginning
// of the server's opening, up to the version, not at all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "base/little_endian.h"
#include "net/handshake.h"
#include "net/message_check.h"

namespace perseus::store_protocol {

constexpr uint32_t kMagic = 0x54535350;  // "PSST"
constexpr uint32_t kFormat = 5;
constexpr int64_t kHandshakeLimit = 5 * kSecond;

constexpr uint32_t kSet = 1;
constexpr uint32_t kGet = 2;
constexpr uint32_t kGetAll = 3;
constexpr uint32_t kGetPresent = 4;
constexpr uint32_t kAbsent = 0xffffffff;
// A client whose keys appear one after the other need not be woken for each: the server gathers for so long.
constexpr int64_t kGather = 50 * kMillisecond;
constexpr size_t kMaxKey = 4 * 1024;
constexpr size_t kMaxValue = 16 * 1024 * 1024;
constexpr size_t kMaxNumbers = kMaxValue / 4;
constexpr size_t kRequestHeader = 8;  // op and key_size
constexpr size_t kEntryHeader = 8;    // number and size
constexpr size_t kCode = AuthenticationCode::kBytes;
constexpr size_t kMaxRequest = kRequestHeader + kMaxKey + kMaxValue;

// Of requests and of replies on a connection whose sides have this session.
inline AuthenticationCode code_of_requests(const std::string& session) {
  return AuthenticationCode(message_key(session, 1, 0, "store"));
}
inline AuthenticationCode code_of_replies(const std::string& session) {
  return AuthenticationCode(message_key(session, 0, 1, "store"));
}

inline Opening opening() { return Opening{kMagic, kFormat, this_version(), 0, 0, 0, ""}; }

}  // namespace perseus::store_protocol

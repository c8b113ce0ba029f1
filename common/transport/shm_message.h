// What local ranks say to each other on their UNIX sockets: one SEQPACKET message each, with descriptors of shared
// memory where needed. Plain functions; thread-safe on different sockets.
//
// The text of a hello is the connector's opening and answer, that of a welcome the verdict (net/handshake.h). The
// listener's opening travels through the store: its nonce is the hash of the socket's random name.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "net/socket.h"

namespace perseus {

constexpr uint32_t kShmMagic = 0x50534d32;  // "PSM2", of messages and openings
constexpr uint32_t kShmFormat = 2;
constexpr size_t kMaxControlText = 1024;
constexpr int kMaxFds = 2;

enum class ShmMessageType : uint32_t { kHello = 1, kWelcome = 2, kRing = 3, kControl = 4 };

struct ShmMessage {
  uint32_t magic = kShmMagic;
  ShmMessageType type = ShmMessageType::kControl;
  uint64_t channel = 0;  // kRing
  uint64_t bytes = 0;    // kRing: capacity; else length of text
  char text[kMaxControlText] = {};
};

// Puts in as much of the text as there is room for.
void set_text(ShmMessage* message, const std::string& text);
// Of any message but kRing.
inline std::string text_of(const ShmMessage& message) { return std::string(message.text, message.bytes); }

// False, with the reason in errno, when the message cannot be sent, now (MSG_DONTWAIT in `flags`) or ever.
bool send_message(int fd, const ShmMessage& message, const int* fds, int fd_count, int flags);

// Does the reason why a message could not be sent go away once others have taken what is on its way to them?
bool may_be_sent_later(int error);

// Descriptors that came along with a message.
struct Passed {
  std::array<Socket, kMaxFds> open;
  int count = 0;
  bool refused = false;  // there were some, but this process may not open so many
};

// > 0: a message; 0: the peer closed, or sent what makes no sense; < 0: nothing now. Does not wait.
int recv_message(int fd, ShmMessage* message, Passed* passed);

}  // namespace perseus

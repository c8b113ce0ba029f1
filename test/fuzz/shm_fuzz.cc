// What a rank of this host, or whoever has found its socket, says there: messages of any size, with any descriptors.
#include <fcntl.h>
#include <sys/socket.h>

#include "fuzz.h"
#include "transport/shm_message.h"

using namespace perseus;
using perseus_fuzz::expect;

namespace {

void say(int socket, const void* bytes, size_t size, size_t descriptors) {
  iovec piece{const_cast<void*>(bytes), size};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)] = {};
  if (descriptors > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * descriptors);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int) * descriptors);
    for (size_t i = 0; i < descriptors; ++i) std::memcpy(CMSG_DATA(head) + i * sizeof(int), &socket, sizeof(int));
  }
  ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  perseus_fuzz::Input input(data, size);
  int ends[2];
  expect(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
  const Socket ours([&] { return ends[0]; }), theirs([&] { return ends[1]; });
  for (size_t said = 1 + input.choice(3); said > 0; --said) {
    const size_t descriptors = input.choice(5);
    if (input.byte() % 2 == 0) {
      ShmMessage message;
      message.type = static_cast<ShmMessageType>(input.choice(6));
      message.bytes = input.value<uint16_t>() % 1200;
      message = input.changed(message);
      say(theirs.fd(), &message, sizeof message, descriptors);
    } else {
      const std::vector<uint8_t> bytes = input.take(1 + input.choice(1200));
      say(theirs.fd(), bytes.data(), bytes.size(), descriptors);
    }
    ShmMessage message;
    Passed passed;
    if (recv_message(ours.fd(), &message, &passed) <= 0) continue;
    expect(message.magic == kShmMagic, "what is taken is a message of ours");
    expect(passed.count <= kMaxFds, "no more descriptors than a message has");
    if (message.type != ShmMessageType::kRing) expect(text_of(message).size() <= kMaxControlText, "a text as it fits");
  }
  return 0;
}

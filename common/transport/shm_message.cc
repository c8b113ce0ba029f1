// sendmsg and recvmsg with SCM_RIGHTS.
#include "transport/shm_message.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/fork_guard.h"

namespace perseus {
namespace {

constexpr size_t kMessageHead = offsetof(ShmMessage, text);

size_t text_size(const ShmMessage& message) { return message.type == ShmMessageType::kRing ? 0 : message.bytes; }

}  // namespace

void set_text(ShmMessage* message, const std::string& text) {
  message->bytes = std::min(text.size(), kMaxControlText);
  std::memcpy(message->text, text.data(), message->bytes);
}

bool send_message(int fd, const ShmMessage& message, const int* fds, int fd_count, int flags) {
  iovec piece{const_cast<ShmMessage*>(&message), kMessageHead + text_size(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  if (fd_count > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
    std::memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
  }
  ssize_t sent;
  do sent = sendmsg(fd, &header, MSG_NOSIGNAL | flags);
  while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

bool may_be_sent_later(int error) {
  return error == EAGAIN || error == ENOBUFS || error == ENOMEM || error == ETOOMANYREFS;
}

int recv_message(int fd, ShmMessage* message, Passed* passed) {
  iovec piece{message, sizeof *message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  *passed = {};
  ssize_t got;
  {
    ForksWait forks_wait(kMaxFds);
    // A peer that closed without having read all that we sent: the kernel says so once, before what the peer said last.
    do got = recvmsg(fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (got < 0 && (errno == EINTR || errno == ECONNRESET));
    if (got < 0) return errno == EAGAIN ? -1 : 0;
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = CMSG_LEN(0); at < c->cmsg_len; at += sizeof(int)) {
        int received;
        std::memcpy(&received, reinterpret_cast<const char*>(c) + at, sizeof received);
        forks_wait.guard(received);
        passed->open[passed->count++] = Socket::of_guarded(received);
      }
    }
  }
  const bool sane = static_cast<size_t>(got) >= kMessageHead && message->magic == kShmMagic &&
                    text_size(*message) <= kMaxControlText &&
                    static_cast<size_t>(got) == kMessageHead + text_size(*message);
  const bool truncated = (header.msg_flags & MSG_CTRUNC) != 0;
  if (!sane || truncated) *passed = {};
  passed->refused = sane && truncated;
  return sane ? 1 : 0;
}

}  // namespace perseus

// Sockets as the store and the TCP transport need them: owned, close-on-exec, closed in forked children, non-blocking.
// Thread-safe as far as one Socket is used by one thread at a time.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/span.h"

namespace perseus {

// Owns one descriptor of any kind; registered with the fork guard.
class Socket {
 public:
  Socket() = default;
  // Of what `open` returns, with no fork in between; empty if that is negative, with the reason in errno.
  explicit Socket(const std::function<int()>& open);
  // Takes ownership of one that is registered already.
  static Socket of_guarded(int fd);
  ~Socket() { reset(); }
  Socket(Socket&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Socket& operator=(Socket&& other) noexcept;

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// An IPv4 or IPv6 address with port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  int family() const { return storage.ss_family; }
  int port() const;
  void set_port(int port);
  std::string host_text() const;  // "10.0.0.5", "fd00::2"
  std::string text() const;       // "10.0.0.5:6666", "[fd00::2]:6666"
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
};

// A numeric IPv4 or IPv6 address; false when it is none.
bool parse_address(const std::string& text, int port, SocketAddress* address);
// What the resolver knows about `host`, in its order. Empty with `*why` set when it knows nothing.
std::vector<SocketAddress> resolve(const std::string& host, int port, std::string* why);
SocketAddress local_address(int fd);
SocketAddress peer_address(int fd);

// Functions that return a Socket return an empty one and leave the reason in errno when they fail. Connections send
// small messages at once (TCP_NODELAY).

// Port 0 = any. `both_families`: an IPv6 socket serves IPv4 as well.
Socket listen_on(const SocketAddress& address, bool both_families = false);
// On every interface, both families where this host has IPv6.
Socket listen_everywhere(int port);
// The connection may still be under way: it is decided when the socket becomes writable, see connect_result().
// `source`, when not null, is the local address to use.
Socket start_connect(const SocketAddress& address, const SocketAddress* source = nullptr);
// 0 when connected, else the error number.
int connect_result(int fd);
// Empty with errno EAGAIN when there is none.
Socket accept_one(int listener);
// A peer whose host vanished shows as an error within about `seconds`, even to one who only waits, unless something
// that was sent is unacknowledged.
void keep_alive(int fd, int seconds = 30);
// So does one that acknowledges nothing, or takes nothing of what was sent, for `seconds`: even if it is only
// suspended.
void limit_unacknowledged(int fd, int seconds = 30);

// Unlike send(2) and recv(2): 0 = nothing possible now, -1 = failed with errno, kEndOfStream = closed by the other
// side.
constexpr ssize_t kEndOfStream = -2;
ssize_t send_some(int fd, const void* data, size_t size);
ssize_t recv_some(int fd, void* data, size_t size);
// Has the other host acknowledged all that was sent? True as well where it never will, since the connection is broken.
bool acknowledged(int fd);

}  // namespace perseus

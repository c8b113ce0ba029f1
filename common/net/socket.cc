// Thin layer over the socket calls: flags that must never be forgotten are set here and nowhere else.
#include "net/socket.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "base/fork_guard.h"

namespace perseus {
namespace {

constexpr int kBacklog = 1024;

void set_option(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof value); }

Socket open_stream(int family) {
  return Socket([=] { return ::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP); });
}

// Closing must not hide why we close.
Socket failed(Socket socket) {
  const int why = errno;
  socket.reset();
  errno = why;
  return Socket();
}

}  // namespace

Socket::Socket(const std::function<int()>& open) : fd_(open_guarded(open)) {}

Socket Socket::of_guarded(int fd) {
  Socket socket;
  socket.fd_ = fd;
  return socket;
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void Socket::reset() {
  close_guarded(fd_);
  fd_ = -1;
}

int SocketAddress::port() const {
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

void SocketAddress::set_port(int port) {
  const auto number = htons(static_cast<uint16_t>(port));
  if (family() == AF_INET6) reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = number;
  else reinterpret_cast<sockaddr_in*>(&storage)->sin_port = number;
}

std::string SocketAddress::host_text() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET6)
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr, text, sizeof text);
  else if (family() == AF_INET)
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr, text, sizeof text);
  return text;
}

std::string SocketAddress::text() const {
  const std::string host = host_text();
  return (family() == AF_INET6 ? "[" + host + "]" : host) + ":" + std::to_string(port());
}

bool parse_address(const std::string& text, int port, SocketAddress* address) {
  *address = SocketAddress();
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address->storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address->storage);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    address->size = sizeof *v4;
  } else if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    address->size = sizeof *v6;
  } else {
    return false;
  }
  address->set_port(port);
  return true;
}

std::vector<SocketAddress> resolve(const std::string& host, int port, std::string* why) {
  std::vector<SocketAddress> addresses(1);
  if (parse_address(host, port, &addresses[0])) return addresses;
  addresses.clear();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int code = getaddrinfo(host.c_str(), nullptr, &hints, &found); code != 0) {
    *why = code == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(code);
    return addresses;
  }
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    SocketAddress address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.size = entry->ai_addrlen;
    address.set_port(port);
    addresses.push_back(address);
  }
  freeaddrinfo(found);
  if (addresses.empty()) *why = "no IPv4 or IPv6 address";
  return addresses;
}

SocketAddress local_address(int fd) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (::getsockname(fd, address.raw(), &address.size) != 0) address = SocketAddress();
  return address;
}

SocketAddress peer_address(int fd) {
  SocketAddress address;
  address.size = sizeof address.storage;
  if (::getpeername(fd, address.raw(), &address.size) != 0) address = SocketAddress();
  return address;
}

Socket listen_on(const SocketAddress& address, bool both_families) {
  Socket socket = open_stream(address.family());
  if (!socket) return socket;
  // A job that ended a moment ago leaves its port in TIME_WAIT; that is no reason to refuse. A listener still is.
  set_option(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address.family() == AF_INET6) set_option(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, both_families ? 0 : 1);
  if (::bind(socket.fd(), address.raw(), address.size) != 0 || ::listen(socket.fd(), kBacklog) != 0)
    return failed(std::move(socket));
  return socket;
}

Socket listen_everywhere(int port) {
  SocketAddress any;
  parse_address("::", port, &any);
  Socket socket = listen_on(any, true);
  if (socket || errno == EADDRINUSE) return socket;
  parse_address("0.0.0.0", port, &any);
  return listen_on(any);
}

Socket start_connect(const SocketAddress& address, const SocketAddress* source) {
  Socket socket = open_stream(address.family());
  if (!socket) return socket;
  set_option(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
  if (source != nullptr) {
    set_option(socket.fd(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
    SocketAddress from = *source;
    from.set_port(0);
    if (::bind(socket.fd(), from.raw(), from.size) != 0) return failed(std::move(socket));
  }
  if (::connect(socket.fd(), address.raw(), address.size) != 0 && errno != EINPROGRESS)
    return failed(std::move(socket));
  return socket;
}

int connect_result(int fd) {
  int why = 0;
  socklen_t size = sizeof why;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &size) == 0 ? why : errno;
}

Socket accept_one(int listener) {
  for (;;) {
    Socket socket([=] { return ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
    // The one who connected may be gone again, or its packet may have been bad: the next may be fine.
    if (!socket && (errno == EINTR || errno == ECONNABORTED || errno == EPROTO)) continue;
    if (socket) set_option(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
    return socket;
  }
}

void keep_alive(int fd, int seconds) {
  constexpr int kLongest = 60, kMostProbes = 127;  // seconds between two probes, unless they would not be enough
  const int pause = std::clamp(seconds / 6, 1, std::max(kLongest, seconds / kMostProbes));
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2 * pause);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, pause);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, std::clamp(seconds / pause - 2, 1, kMostProbes));
}

void limit_unacknowledged(int fd, int seconds) {
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min<int64_t>(int64_t{seconds} * 1000, INT_MAX)));
}

ssize_t send_some(int fd, const void* data, size_t size) {
  const ssize_t sent = ::send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) return sent;
  return errno == EAGAIN || errno == EINTR ? 0 : -1;
}

ssize_t recv_some(int fd, void* data, size_t size) {
  const ssize_t received = ::recv(fd, data, size, MSG_DONTWAIT);
  if (received > 0) return received;
  if (received == 0) return kEndOfStream;
  return errno == EAGAIN || errno == EINTR ? 0 : -1;
}

bool acknowledged(int fd) {
  int missing = 0;
  if (::ioctl(fd, SIOCOUTQ, &missing) != 0 || missing == 0) return true;
  pollfd broken{fd, 0, 0};
  return ::poll(&broken, 1, 0) > 0;
}

}  // namespace perseus

// Asks the kernel's routing table and interface list; nothing is sent.
#include "net/addresses.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "net/interfaces.h"
#include "net/socket.h"

namespace perseus {
namespace {

constexpr int kAnyPort = 9;

Socket probe() {
  return Socket([] { return ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0); });
}

// False without an IPv4 address.
bool resolve_ipv4(const std::string& host, SocketAddress* found) {
  std::string why;
  for (const SocketAddress& address : resolve(host, kAnyPort, &why)) {
    if (address.family() != AF_INET) continue;
    *found = address;
    return true;
  }
  return false;
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string interface_address(const InterfaceChoice& choice) {
  const std::vector<InterfaceAddress> usable = usable_addresses(choice);
  const InterfaceAddress& first = usable.front();
  const auto ipv4 = std::find_if(usable.begin(), usable.end(), [&](const InterfaceAddress& other) {
    return other.interface == first.interface && other.address.family() == AF_INET;
  });
  return (ipv4 == usable.end() ? first : *ipv4).address.host_text();
}

std::string source_address(const std::string& host) {
  SocketAddress address;
  if (!resolve_ipv4(host, &address)) return "";
  const Socket socket = probe();
  if (::connect(socket.fd(), address.raw(), address.size) != 0) return "";
  return local_address(socket.fd()).host_text();
}

bool is_own_address(const std::string& host, std::string* address) {
  SocketAddress found;
  if (!resolve_ipv4(host, &found)) return false;
  *address = found.host_text();
  found.set_port(0);
  return ::bind(probe().fd(), found.raw(), found.size) == 0;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host.compare(0, 4, "127.") == 0 || host == "::1";
}

}  // namespace perseus

// Asks the kernel's routing table and interface list; nothing is sent.
#include "net/addresses.h"

#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
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

std::vector<std::string> interface_names() {
  std::vector<std::string> names;
  struct if_nameindex* list = if_nameindex();
  for (const struct if_nameindex* entry = list; entry != nullptr && entry->if_name != nullptr; ++entry)
    names.emplace_back(entry->if_name);
  if (list != nullptr) if_freenameindex(list);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string interface_address(const std::string& name) {
  ifreq request{};
  name.copy(request.ifr_name, sizeof request.ifr_name - 1);
  if (::ioctl(probe().fd(), SIOCGIFADDR, &request) != 0) {
    std::string here;
    for (const std::string& known : interface_names()) here += (here.empty() ? "" : ", ") + known;
    fail(ErrorKind::kInvalidArgument,
         "[rendezvous] network interface '" + name + "': no such interface or no IPv4 address; this host has " + here);
  }
  SocketAddress address;
  address.size = sizeof(sockaddr_in);
  std::memcpy(&address.storage, &request.ifr_addr, sizeof(sockaddr_in));
  return address.host_text();
}

std::string interface_address(const InterfaceChoice& choice) {
  for (const std::string& entry : choice.entries())
    for (const std::string& name : interface_names())
      if (choice.matches(entry, name)) return interface_address(name);
  return interface_address(choice.entries().front());
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

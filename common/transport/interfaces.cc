// Reads the kernel's list with getifaddrs.
#include "transport/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/config.h"
#include "base/descriptors.h"
#include "base/error.h"

namespace perseus {
namespace {

constexpr int kMaxAddressBytes = 16;

// The address in network order; returns its length.
int address_bytes(const SocketAddress& address, unsigned char bytes[kMaxAddressBytes]) {
  if (address.family() == AF_INET6) {
    std::memcpy(bytes, &reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr, 16);
    return 16;
  }
  std::memcpy(bytes, &reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr, 4);
  return 4;
}

SocketAddress copy_of(const sockaddr* raw) {
  SocketAddress address;
  address.size = raw->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::memcpy(&address.storage, raw, address.size);
  address.set_port(0);
  return address;
}

int prefix_of(const sockaddr* mask) {
  if (mask == nullptr) return 0;
  unsigned char bytes[kMaxAddressBytes];
  const int length = address_bytes(copy_of(mask), bytes);
  int bits = 0;
  for (int i = 0; i < length; ++i) bits += __builtin_popcount(bytes[i]);
  return bits;
}

bool link_local(const SocketAddress& address) {
  unsigned char bytes[kMaxAddressBytes];
  if (address_bytes(address, bytes) == 4) return bytes[0] == 169 && bytes[1] == 254;
  return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
}

// Bridges and tunnels that look the same on every host and lead to no other.
bool made_by_container_engine(const std::string& name) {
  for (const char* prefix :
       {"docker", "br-", "veth", "virbr", "cni", "cali", "flannel", "podman", "lxcbr", "lxdbr", "kube-", "nerdctl"})
    if (name.compare(0, std::strlen(prefix), prefix) == 0) return true;
  return false;
}

struct Found {
  std::vector<std::string> names;  // of all interfaces, also those without address
  std::vector<InterfaceAddress> addresses;
};

Found look() {
  Found found;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) fail(ErrorKind::kIo, "[tcp] getifaddrs: " + error_text(errno));
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    const std::string name = entry->ifa_name;
    if (std::find(found.names.begin(), found.names.end(), name) == found.names.end()) found.names.push_back(name);
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    if (entry->ifa_addr->sa_family != AF_INET && entry->ifa_addr->sa_family != AF_INET6) continue;
    InterfaceAddress address;
    address.interface = name;
    address.address = copy_of(entry->ifa_addr);
    address.prefix = prefix_of(entry->ifa_netmask);
    address.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    if (!link_local(address.address)) found.addresses.push_back(std::move(address));
  }
  ::freeifaddrs(list);
  return found;
}

[[noreturn]] void refuse(const std::string& name, const char* fact, const Found& found) {
  std::string all;
  for (const std::string& known : found.names) all += (all.empty() ? "" : ", ") + known;
  fail(ErrorKind::kInvalidArgument, std::string("[tcp] ") + variable(Var::kInterfaces).name + " names '" + name +
                                        "', " + fact + ": this host has " + all);
}

std::vector<InterfaceAddress> chosen(const std::string& names, const Found& found) {
  std::vector<InterfaceAddress> result;
  std::stringstream stream(names);
  for (std::string name; std::getline(stream, name, ',');) {
    name.erase(0, name.find_first_not_of(" \t"));
    name.erase(name.find_last_not_of(" \t") + 1);
    if (name.empty()) continue;
    if (std::find(found.names.begin(), found.names.end(), name) == found.names.end())
      refuse(name, "which does not exist", found);
    const size_t before = result.size();
    for (const InterfaceAddress& address : found.addresses)
      if (address.interface == name) result.push_back(address);
    if (result.size() == before) refuse(name, "which is down or has no address", found);
  }
  return result;
}

}  // namespace

std::vector<InterfaceAddress> usable_addresses(const std::string& names) {
  const Found found = look();
  std::vector<InterfaceAddress> result = chosen(names, found);
  if (!result.empty()) return result;
  const auto take = [&](auto wanted) {
    for (const InterfaceAddress& address : found.addresses)
      if (wanted(address)) result.push_back(address);
  };
  take([](const InterfaceAddress& a) { return !a.loopback && !made_by_container_engine(a.interface); });
  if (result.empty()) take([](const InterfaceAddress& a) { return !a.loopback; });
  take([](const InterfaceAddress& a) { return a.loopback; });
  return result;
}

bool same_subnet(const SocketAddress& a, const SocketAddress& b, int prefix) {
  if (a.family() != b.family()) return false;
  unsigned char left[kMaxAddressBytes], right[kMaxAddressBytes];
  const int length = address_bytes(a, left);
  address_bytes(b, right);
  for (int i = 0; i < length; ++i) {
    const int bits = std::min(std::max(prefix - 8 * i, 0), 8);
    const int mask = 0xff << (8 - bits) & 0xff;
    if ((left[i] & mask) != (right[i] & mask)) return false;
  }
  return true;
}

}  // namespace perseus

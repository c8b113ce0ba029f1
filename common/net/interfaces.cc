// Reads the kernel's list with getifaddrs.
#include "net/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

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

[[noreturn]] void refuse(const InterfaceChoice& choice, const std::string& fact, const Found& found) {
  std::string all;
  for (const std::string& known : found.names) all += (all.empty() ? "" : ", ") + known;
  fail(ErrorKind::kInvalidArgument, "[tcp] " + choice.variable() + fact + ": this host has " + all +
                                        "; PERSEUS_GLOO_NETWORK_INTERFACE names interfaces for Perseus alone");
}

// Of the interfaces that an entry means, in the order of their names, so that all hosts count alike.
std::vector<InterfaceAddress> meant_by(const std::string& entry, const InterfaceChoice& choice, const Found& found) {
  std::vector<InterfaceAddress> result;
  for (const InterfaceAddress& address : found.addresses)
    if (choice.matches(entry, address.interface)) result.push_back(address);
  std::stable_sort(result.begin(), result.end(),
                   [](const auto& a, const auto& b) { return a.interface < b.interface; });
  return result;
}

std::vector<InterfaceAddress> named(const InterfaceChoice& choice, const Found& found) {
  std::vector<InterfaceAddress> result;
  for (const std::string& entry : choice.entries()) {
    const auto means = [&](const std::string& name) { return choice.matches(entry, name); };
    std::vector<InterfaceAddress> meant = meant_by(entry, choice, found);
    const std::string name = " names '" + entry + (choice.by_prefix() ? "…'" : "'");
    if (std::none_of(found.names.begin(), found.names.end(), means))
      refuse(choice, name + ", which does not exist", found);
    if (meant.empty()) refuse(choice, name + ", which is down or has no address", found);
    for (InterfaceAddress& address : meant) {
      const auto same = [&](const InterfaceAddress& other) {
        return other.interface == address.interface && other.address.host_text() == address.address.host_text();
      };
      if (std::none_of(result.begin(), result.end(), same)) result.push_back(std::move(address));
    }
  }
  return result;
}

}  // namespace

std::vector<InterfaceAddress> usable_addresses(const InterfaceChoice& choice) {
  const Found found = look();
  if (choice.names_some()) return named(choice, found);
  std::vector<InterfaceAddress> result;
  const auto take = [&](auto wanted) {
    for (const InterfaceAddress& address : found.addresses)
      if (choice.allows(address.interface) && wanted(address)) result.push_back(address);
  };
  take([](const InterfaceAddress& a) { return !a.loopback && !made_by_container_engine(a.interface); });
  if (result.empty()) take([](const InterfaceAddress& a) { return !a.loopback; });
  take([](const InterfaceAddress& a) { return a.loopback; });
  if (result.empty() && !choice.entries().empty())
    refuse(choice, "='" + choice.value() + "' leaves no interface that is up", found);
  return result;
}

int interfaces_at_once(const InterfaceChoice& choice) {
  if (!choice.names_some()) return 1;
  if (!choice.by_prefix()) return static_cast<int>(choice.entries().size());
  std::vector<std::string> names;
  for (const InterfaceAddress& address : look().addresses)
    if (choice.allows(address.interface)) names.push_back(address.interface);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return std::max(1, static_cast<int>(names.size()));
}

bool has_rdma() {
  std::error_code none;
  return std::filesystem::directory_iterator("/sys/class/infiniband", none) != std::filesystem::directory_iterator();
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

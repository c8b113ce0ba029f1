// The published form is a few lines of text:
//   endpoint = "perseus-tcp 1 " ("chosen" | "automatic") LF host LF address*
//   address  = interface SP number SP port SP prefix SP ("loopback" | "network") LF
#include "transport/tcp_endpoint.h"

#include <algorithm>
#include <sstream>

#include "base/error.h"

namespace perseus {
namespace {

// A rank publishes the first of them, and takes no more from others.
constexpr size_t kMaxAddresses = 256;

// Lower is better.
int cost(const TcpEndpoint& own, const InterfaceAddress& theirs, bool same_host) {
  const bool v6 = theirs.address.family() == AF_INET6;
  if (theirs.loopback) return same_host ? v6 : 100;
  bool shared = false;
  for (const InterfaceAddress& mine : own.addresses) {
    if (mine.loopback) continue;
    // Elsewhere this number is somebody else: a bridge that every host has.
    if (!same_host && mine.address.host_text() == theirs.address.host_text()) return 100;
    shared = shared || same_subnet(mine.address, theirs.address, theirs.prefix);
  }
  return (shared ? 10 : 20) + v6;
}

// One address per interface, IPv4 where it has one.
std::vector<SocketAddress> one_per_interface(const TcpEndpoint& endpoint) {
  std::vector<const InterfaceAddress*> picked;
  for (const InterfaceAddress& address : endpoint.addresses) {
    const auto same = [&](const InterfaceAddress* other) { return other->interface == address.interface; };
    const auto found = std::find_if(picked.begin(), picked.end(), same);
    if (found == picked.end()) picked.push_back(&address);
    else if ((*found)->address.family() == AF_INET6 && address.address.family() == AF_INET) *found = &address;
  }
  std::vector<SocketAddress> result;
  for (const InterfaceAddress* address : picked) result.push_back(address->address);
  return result;
}

}  // namespace

std::string TcpEndpoint::encode() const {
  std::string text = std::string("perseus-tcp 1 ") + (chosen ? "chosen" : "automatic") + "\n" + host + "\n";
  for (size_t i = 0; i < std::min(addresses.size(), kMaxAddresses); ++i) {
    const InterfaceAddress& entry = addresses[i];
    text += entry.interface + " " + entry.address.host_text() + " " + std::to_string(entry.address.port()) + " " +
            std::to_string(entry.prefix) + (entry.loopback ? " loopback\n" : " network\n");
  }
  return text;
}

TcpEndpoint TcpEndpoint::decode(const std::string& text, int rank) {
  const auto refuse = [&] {
    fail(ErrorKind::kIo,
         "[tcp] rank " + std::to_string(rank) +
             " published something that is not an address: is the same Perseus installed on every host?");
  };
  TcpEndpoint endpoint;
  std::istringstream lines(text);
  std::string first, line;
  if (!std::getline(lines, first) || !std::getline(lines, endpoint.host)) refuse();
  endpoint.chosen = first == "perseus-tcp 1 chosen";
  if (!endpoint.chosen && first != "perseus-tcp 1 automatic") refuse();
  while (std::getline(lines, line)) {
    InterfaceAddress entry;
    std::istringstream words(line);
    std::string number, kind;
    int port = 0;
    words >> entry.interface >> number >> port >> entry.prefix >> kind;
    if (!words || port < 1 || port > 65535 || entry.prefix < 0 || entry.prefix > 128 ||
        !parse_address(number, port, &entry.address) || endpoint.addresses.size() == kMaxAddresses)
      refuse();
    entry.loopback = kind == "loopback";
    endpoint.addresses.push_back(entry);
  }
  if (endpoint.addresses.empty()) refuse();
  return endpoint;
}

std::vector<SocketAddress> candidates(const TcpEndpoint& own, const TcpEndpoint& theirs) {
  const bool same_host = own.host == theirs.host;
  std::vector<std::pair<int, SocketAddress>> ordered;
  for (const InterfaceAddress& entry : theirs.addresses)
    ordered.emplace_back(cost(own, entry, same_host), entry.address);
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  // What looks hopeless is tried only when nothing else is there.
  const int limit = std::max(ordered.front().first, 99);
  std::vector<SocketAddress> result;
  for (const auto& entry : ordered)
    if (entry.first <= limit) result.push_back(entry.second);
  return result;
}

std::vector<std::pair<SocketAddress, SocketAddress>> stripes(const TcpEndpoint& own, const TcpEndpoint& theirs) {
  std::vector<std::pair<SocketAddress, SocketAddress>> pairs;
  if (!own.chosen || !theirs.chosen) return pairs;
  const std::vector<SocketAddress> mine = one_per_interface(own), others = one_per_interface(theirs);
  for (size_t i = 0; i < std::max(mine.size(), others.size()); ++i) {
    const SocketAddress& from = mine[i % mine.size()];
    const SocketAddress& to = others[i % others.size()];
    if (from.family() == to.family()) pairs.emplace_back(from, to);
  }
  if (pairs.size() < 2) pairs.clear();
  return pairs;
}

}  // namespace perseus

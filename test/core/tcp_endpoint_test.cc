// Which addresses ranks publish and in which order others try them.
#include "transport/tcp_endpoint.h"

#include <gtest/gtest.h>

#include "net/interfaces.h"
#include "tcp_ranks.h"

namespace perseus {
namespace {

InterfaceAddress at(const std::string& interface, const std::string& number, int prefix, int port = 1) {
  InterfaceAddress entry;
  entry.interface = interface;
  parse_address(number, port, &entry.address);
  entry.prefix = prefix;
  entry.loopback = interface == "lo";
  return entry;
}

std::vector<std::string> texts(const std::vector<SocketAddress>& addresses) {
  std::vector<std::string> result;
  for (const SocketAddress& address : addresses) result.push_back(address.text());
  return result;
}

TEST(TcpEndpoint, OrderPrefersWhatIsNear) {
  TcpEndpoint own, theirs;
  own.host = theirs.host = "a";
  own.addresses = {at("eth0", "10.1.0.5", 16), at("eth1", "192.168.7.5", 24), at("br0", "172.17.0.1", 16)};
  theirs.addresses = {at("x", "10.9.0.1", 16, 11), at("br0", "172.17.0.1", 16, 12), at("z", "fd00::9", 64, 13),
                      at("y", "192.168.7.9", 24, 14), at("lo", "127.0.0.1", 8, 15)};
  theirs = TcpEndpoint::decode(theirs.encode(), 3);
  EXPECT_EQ(texts(candidates(own, theirs))[0], "127.0.0.1:15");
  theirs.host = "b";
  EXPECT_EQ(texts(candidates(own, theirs)),
            (std::vector<std::string>{"192.168.7.9:14", "10.9.0.1:11", "[fd00::9]:13"}));
  theirs.addresses.resize(2);
  theirs.addresses.erase(theirs.addresses.begin());
  EXPECT_EQ(texts(candidates(own, theirs)), (std::vector<std::string>{"172.17.0.1:12"}));
}

TEST(TcpEndpoint, StripesPairChosenInterfacesInTurn) {
  TcpEndpoint own, theirs;
  own.addresses = {at("a", "fd00::1", 64), at("a", "10.0.0.1", 24), at("b", "10.0.1.1", 24)};
  theirs.addresses = {at("c", "10.0.0.2", 24, 9), at("d", "10.0.1.2", 24, 8)};
  EXPECT_TRUE(stripes(own, theirs).empty());
  own.chosen = theirs.chosen = true;
  const auto pairs = stripes(own, theirs);
  ASSERT_EQ(pairs.size(), 2u);
  EXPECT_EQ(pairs[0].first.host_text() + ">" + pairs[0].second.text(), "10.0.0.1>10.0.0.2:9");
  EXPECT_EQ(pairs[1].first.host_text() + ">" + pairs[1].second.text(), "10.0.1.1>10.0.1.2:8");
  own.addresses.resize(2);
  theirs.addresses.resize(1);
  EXPECT_TRUE(stripes(own, theirs).empty());
}

TEST(TcpEndpoint, AHostWithManyAddressesPublishesAsManyAsOthersTake) {
  TcpEndpoint own;
  own.host = "a";
  for (int i = 0; i < 300; ++i)
    own.addresses.push_back(at("eth0", "10.1." + std::to_string(i / 250) + "." + std::to_string(i % 250 + 1), 16));
  const TcpEndpoint published = TcpEndpoint::decode(own.encode(), 3);
  ASSERT_EQ(published.addresses.size(), 256u);
  EXPECT_EQ(published.addresses.back().address.host_text(), own.addresses[255].address.host_text());
}

TEST(TcpEndpoint, NonsenseIsRefusedWithTheRank) {
  for (const char* text :
       {"", "perseus-tcp 2 chosen\nh\nlo 127.0.0.1 1 8 loopback\n", "perseus-tcp 1 automatic\nh\n",
        "perseus-tcp 1 automatic\nh\nlo 127.0.0.1 0 8 loopback\n",
        "perseus-tcp 1 automatic\nh\nlo 127.0.0.1 70000 8 loopback\n",
        "perseus-tcp 1 automatic\nh\nlo localhost 1 8 loopback\n", "perseus-tcp 1 automatic\nh\nlo\n"}) {
    const Error error = error_of([&] { TcpEndpoint::decode(text, 12); });
    EXPECT_EQ(error.kind(), ErrorKind::kIo) << text;
    EXPECT_TRUE(contains(error, "rank 12")) << error.what();
  }
}

TEST(Interfaces, SubnetsAreComparedBitByBit) {
  SocketAddress a, b, c;
  parse_address("10.1.2.3", 0, &a);
  parse_address("10.1.3.3", 0, &b);
  parse_address("fd00::1", 0, &c);
  EXPECT_TRUE(same_subnet(a, b, 23));
  EXPECT_FALSE(same_subnet(a, b, 24));
  EXPECT_TRUE(same_subnet(a, b, 0));
  EXPECT_FALSE(same_subnet(a, c, 0));
}

}  // namespace
}  // namespace perseus

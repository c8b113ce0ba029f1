// The TCP transport with ranks as threads: bytes, wake-ups, deaths, and how starting can fail.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "net/interfaces.h"
#include "tcp_ranks.h"

namespace perseus {
namespace {

TEST(Tcp, BytesArriveExactlyOnManyChannelsBothWays) {
  constexpr int kSize = 3;
  run_ranks(kSize, [](Rank& self) {
    const Channel channels[] = {{0, 0}, {0, 3}, {5, 0}, {0, kControlStream}, {5, kControlStream + 1}};
    std::vector<std::unique_ptr<Conversation>> talks;
    for (const int peer : others(self.world.rank, kSize)) {
      EXPECT_TRUE(self.transport->reaches(peer));
      EXPECT_FALSE(self.transport->link(peer, {0, 0}).has_windows());
      for (const Channel channel : channels)
        talks.push_back(std::make_unique<Conversation>(self.world.rank, *self.transport, peer, channel,
                                                       channel.stream >= kControlStream ? 50'001 : 3'000'017));
    }
    self.drive([&] {
      bool all = true;
      for (const auto& talk : talks) {
        talk->step();
        all = all && talk->done();
      }
      return all;
    });
    for (const auto& talk : talks) EXPECT_TRUE(talk->exact());
    const uint64_t payload = 2 * (3 * 3'000'017 + 2 * 50'001);
    EXPECT_GE(self.transport->bytes_sent(), payload);
    EXPECT_LT(self.transport->bytes_sent(), payload + 2000);
    EXPECT_GE(self.transport->bytes_received(), payload);
    EXPECT_FALSE(self.transport->reaches(self.world.rank));
    EXPECT_GT(self.transport->staging_bytes(), 0u);
    EXPECT_LE(self.transport->staging_bytes(), 2 * (3 * kMaxMessage + 2 * 2 * kMaxControlMessage));
    // Nobody leaves while another still reads.
    Link* bell[kSize];
    for (const int peer : others(self.world.rank, kSize)) bell[peer] = &self.transport->link(peer, {9, 9});
    Byte byte = 1;
    int arrived = 0;
    std::vector<bool> told(kSize), seen(kSize);
    self.drive([&] {
      const iovec piece{&byte, 1};
      for (const int peer : others(self.world.rank, kSize)) {
        if (!told[peer]) told[peer] = bell[peer]->try_send(&piece, 1) == 1;
        if (!seen[peer] && bell[peer]->recv_window(1)) seen[peer] = true, ++arrived;
      }
      return arrived == kSize - 1 && std::count(told.begin(), told.end(), true) == kSize - 1;
    });
  });
}

// Heartbeats and data alike: no connection waits for ever for a host that vanished.
TEST(Tcp, EveryConnectionIsKeptAlive) {
  run_ranks(2, [](Rank& self) {
    Link& link = self.transport->link(1 - self.world.rank, {0, 1});
    Byte byte = 1;
    const iovec piece{&byte, 1};
    const auto exchange = [&] {
      bool told = false;
      self.drive([&] {
        if (!told) told = link.try_send(&piece, 1) == 1;
        return told && link.recv_window(1);
      });
      link.recv_release(1);
    };
    exchange();
    if (self.world.rank == 0) {
      int connections = 0, limited = 0;  // with both ends in this process
      for (int fd = 0; fd < 1024; ++fd) {
        sockaddr_storage peer{};
        socklen_t size = sizeof peer;
        if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
        if (peer.ss_family != AF_INET && peer.ss_family != AF_INET6) continue;
        ++connections;
        const auto option = [&](int level, int name) {
          int value = -1;
          socklen_t bytes = sizeof value;
          EXPECT_EQ(getsockopt(fd, level, name, &value, &bytes), 0);
          return value;
        };
        EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
        const int noticed_after =
            option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPCNT) * option(IPPROTO_TCP, TCP_KEEPINTVL);
        EXPECT_TRUE(noticed_after > 60 && noticed_after <= 70) << "GLOO_TIMEOUT_SECONDS and 10 s: " << noticed_after;
        const int limit_ms = option(IPPROTO_TCP, TCP_USER_TIMEOUT);
        EXPECT_TRUE(limit_ms == 0 || limit_ms == 70'000) << limit_ms;
        limited += limit_ms != 0;
      }
      EXPECT_GE(connections, 4);
      EXPECT_EQ(limited, 2) << "the control connection";
    }
    exchange();  // nobody leaves before
  });
}

// A suspended process takes nothing. Its host acknowledges what it can, and goes on doing so.
TEST(Tcp, AConnectionThatIsKeptAliveLastsWhileItsReceiverTakesNothing) {
  const Socket listener = listen_everywhere(0);
  SocketAddress address = local_address(listener.fd());
  ASSERT_TRUE(parse_address("127.0.0.1", address.port(), &address));
  const Socket sender = start_connect(address);
  pollfd ready{listener.fd(), POLLIN, 0};
  ASSERT_EQ(poll(&ready, 1, 60'000), 1);
  const Socket receiver = accept_one(listener.fd());
  ASSERT_TRUE(sender && receiver);
  keep_alive(sender.fd(), 1);
  const std::vector<Byte> data(1 << 20);
  const auto fill = [&] {
    ssize_t all = 0;
    for (ssize_t n; (n = send_some(sender.fd(), data.data(), data.size())) != 0; all += n)
      if (n < 0) return n;
    return all;
  };
  EXPECT_GT(fill(), 0);
  std::this_thread::sleep_for(std::chrono::seconds(3));  // what is tested: longer than the limit
  std::vector<Byte> taken(1 << 20);
  while (recv_some(receiver.fd(), taken.data(), taken.size()) > 0) continue;
  pollfd writable{sender.fd(), POLLOUT, 0};
  ASSERT_EQ(poll(&writable, 1, 60'000), 1);
  EXPECT_EQ(connect_result(sender.fd()), 0);
  EXPECT_GT(fill(), 0);
}

// A rank that sleeps whenever it has to wait is woken by every byte it waits for: no wait may last until its time
// limit.
TEST(Tcp, SleeperIsWokenByDataSpaceAndControlMessages) {
  run_ranks(2, [](Rank& self) {
    const int peer = 1 - self.world.rank;
    Link& link = self.transport->link(peer, {0, 1});
    int64_t longest = 0;
    const auto sleep_until = [&](const std::function<bool()>& ready) {
      const int64_t deadline = now_ns() + 2 * kLimit;
      while (now_ns() < deadline) {
        self.waker.prepare_sleep();
        self.transport->poll(self.waker.take_events());
        if (ready()) return self.waker.cancel_sleep();
        const int64_t begin = now_ns();
        self.waker.wait(kLimit);
        longest = std::max(longest, now_ns() - begin);
      }
      FAIL() << "waited too long";
    };
    std::vector<Byte> bulk(8'000'000, static_cast<Byte>(self.world.rank + 1));
    for (uint32_t round = 0; round < 200; ++round) {
      uint32_t sent = round * 2 + static_cast<uint32_t>(self.world.rank), got = 0;
      const iovec out{&sent, 4};
      bool told = false;
      sleep_until([&] {
        if (!told) told = link.try_send(&out, 1) == 4;
        const ConstSpan window = link.recv_window(4);
        if (!told || !window) return false;
        std::memcpy(&got, window.data, 4);
        link.recv_release(4);
        return true;
      });
      ASSERT_EQ(got, round * 2 + static_cast<uint32_t>(peer));
    }
    // More than the kernel buffers: the sender has to be woken by space.
    size_t moved = 0;
    std::vector<Byte> in(bulk.size());
    sleep_until([&] {
      const iovec piece{(self.world.rank == 0 ? bulk.data() : in.data()) + moved, bulk.size() - moved};
      if (moved < bulk.size()) moved += self.world.rank == 0 ? link.try_send(&piece, 1) : link.try_recv(&piece, 1);
      return moved == bulk.size();
    });
    const bool right = self.world.rank == 0 || in == std::vector<Byte>(bulk.size(), 1);
    EXPECT_TRUE(right);
    // Both wait for the other's control message, so neither leaves early.
    if (self.world.rank == 1) self.transport->send_control_message(0, "done");
    PeerEvent event;
    sleep_until([&] { return self.transport->next_event(&event); });
    EXPECT_EQ(event.text, "done");
    if (self.world.rank == 0) self.transport->send_control_message(1, "done");
    EXPECT_LT(longest, kLimit - kSecond);
  });
}

TEST(Tcp, AConnectionOfAForgottenGroupIsClosed) {
  run_ranks(2, [](Rank& self) {
    PeerEvent event;
    if (self.world.rank == 0) {
      self.transport->forget(1, 5);
      self.transport->send_control_message(1, "forgotten");
      self.drive([&] { return self.transport->next_event(&event); });
      EXPECT_EQ(self.transport->staging_bytes(), 0u);
      return;
    }
    self.drive([&] { return self.transport->next_event(&event); });
    Link& late = self.transport->link(0, {5, kControlStream});
    const Error error = error_of([&] { self.drive([&] { return late.recv_window(1).size != 0; }); });
    EXPECT_TRUE(contains(error, "cannot connect to")) << error.what();
    self.transport->send_control_message(0, "done");
    self.drive([&] { return self.transport->next_event(&event); });  // rank 0 has left
  });
}

TEST(Tcp, ControlMessagesKeepTheirOrderAndHeartbeatsArrive) {
  run_ranks(2, [](Rank& self) {
    const int peer = 1 - self.world.rank;
    for (int i = 0; i < 20; ++i)
      self.transport->send_control_message(peer, std::string(1 + i * 50, static_cast<char>('a' + i)));
    for (int i = 0; i < 20; ++i) {
      PeerEvent event;
      self.drive([&] { return self.transport->next_event(&event); });
      EXPECT_EQ(event.peer, peer);
      EXPECT_EQ(event.kind, PeerEvent::Kind::kControlMessage);
      EXPECT_EQ(event.text, std::string(1 + i * 50, static_cast<char>('a' + i)));
    }
    // Rank 1 sends heartbeats until rank 0 says that it has received one.
    const int64_t before = self.transport->last_alive_ns(peer);
    PeerEvent event;
    if (self.world.rank == 1) {
      self.drive([&] {
        self.transport->send_heartbeats();
        return self.transport->next_event(&event);
      });
      EXPECT_EQ(event.text, "received");
    } else {
      self.drive([&] { return self.transport->last_alive_ns(peer) > before; });
      EXPECT_FALSE(self.transport->next_event(&event)) << "a heartbeat is no event";
      self.transport->send_control_message(peer, "received");
    }
  });
}

// Rank 0 leaves with words and bytes on their way: they arrive, then its end is noticed, once, and calls say so.
TEST(Tcp, LastWordsArriveBeforeTheEnd) {
  run_ranks(3, [](Rank& self) {
    std::vector<Byte> bytes(100'000, 42);
    if (self.world.rank == 0) {
      for (const int peer : {1, 2}) {
        Link& link = self.transport->link(peer, {0, 0});
        size_t sent = 0;
        self.drive([&] {
          const iovec piece{bytes.data() + sent, bytes.size() - sent};
          sent += link.try_send(&piece, 1);
          return sent == bytes.size();
        });
        self.transport->send_control_message(peer, "bye");
      }
      self.transport.reset();
      return;
    }
    Link& link = self.transport->link(0, {0, 0});
    Link& unused = self.transport->link(0, {0, 1});
    std::vector<std::string> words;
    bool gone = false;
    self.drive([&] {
      self.transport->send_heartbeats();  // unread bytes at the one who leaves
      PeerEvent event;
      while (self.transport->next_event(&event)) {
        if (event.peer != 0) continue;
        if (event.kind == PeerEvent::Kind::kGone) gone = true;
        else words.push_back(event.text);
      }
      return gone;
    });
    EXPECT_EQ(words, std::vector<std::string>{"bye"});
    size_t received = 0;
    std::vector<Byte> in(bytes.size());
    self.drive([&] {
      const iovec piece{in.data() + received, in.size() - received};
      received += link.try_recv(&piece, 1);
      return received == in.size();
    });
    EXPECT_EQ(in, bytes);
    const Error error = error_of([&] { self.drive([&] { return static_cast<bool>(link.recv_window(1)); }); });
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_TRUE(contains(error, "rank 0")) << error.what();
    const iovec piece{bytes.data(), 1};
    EXPECT_EQ(error_of([&] { self.drive([&] { return unused.try_send(&piece, 1) == 7; }); }).kind(), ErrorKind::kIo);
    Link& late = self.transport->link(0, {0, 2});
    EXPECT_EQ(error_of([&] { self.drive([&] { return static_cast<bool>(late.recv_window(1)); }); }).kind(),
              ErrorKind::kIo);
    self.transport->send_control_message(0, "to a dead rank");
    // The other survivor is untouched.
    const int peer = 3 - self.world.rank;
    Conversation talk(self.world.rank, *self.transport, peer, {1, 0}, 100'003);
    Conversation bell(self.world.rank, *self.transport, peer, {1, 1}, 1);
    self.drive([&] { return talk.step(), talk.done(); });
    EXPECT_TRUE(talk.exact());
    self.drive([&] { return bell.step(), bell.done(); });
    PeerEvent event;
    while (self.transport->next_event(&event))
      EXPECT_FALSE(event.peer == 0) << "reported gone twice, or a message after the end";
  });
}

// A child made by fork (a DataLoader worker) that outlives its parent's transport must not keep its connections open.
TEST(Tcp, ForkedChildDoesNotHideTheEnd) {
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  std::atomic<pid_t> child{-1};
  run_ranks(2, [&](Rank& self) {
    Link& link = self.transport->link(1 - self.world.rank, {0, 0});
    Byte byte = 5;
    const iovec piece{&byte, 1};
    self.drive([&] { return link.try_send(&piece, 1) == 1; });
    self.drive([&] { return static_cast<bool>(link.recv_window(1)); });
    if (self.world.rank == 0) {
      child = ::fork();
      if (child == 0) {
        ::close(hold[1]);
        _exit(::read(hold[0], &byte, 1) == 0 ? 0 : 1);  // lives until the test closes its end
      }
      self.transport.reset();
      return;
    }
    PeerEvent event;
    self.drive([&] { return self.transport->next_event(&event); });
    EXPECT_EQ(event.kind, PeerEvent::Kind::kGone);
  });
  ::close(hold[0]);
  ::close(hold[1]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Until the rank can be reached: from then on it need not be given time to start.
void wait_for_address(Store* store, int rank) { store->get("job/7/tcp/" + std::to_string(rank), now_ns() + kLimit); }

// Whoever gives up first tells the others for whom it waited.
TEST(Tcp, MissingRankIsNamedByAll) {
  const auto store = make_memory_store();
  std::thread one([&] {
    const Error error = error_of([&] { Rank(world_of(1, 3), *store); });
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_TRUE(contains(error, "rank 0 ended")) << error.what();
    EXPECT_TRUE(contains(error, "rank 2 had not")) << error.what();
  });
  wait_for_address(store.get(), 1);
  const Error error = error_of([&] { Rank(world_of(0, 3), *store, kLoopback, 5 * kSecond); });
  one.join();
  EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
  EXPECT_TRUE(contains(error, "rank 2 in time")) << error.what();
  // A rank that did not even publish where it is.
  const Error alone = error_of([&] { Rank(world_of(1, 2), *make_memory_store(), kLoopback, kSecond / 5); });
  EXPECT_EQ(alone.kind(), ErrorKind::kTimeout);
  EXPECT_TRUE(contains(alone, "rank 0 in time")) << alone.what();
}

TEST(Tcp, ConnectingCanBeInterrupted) {
  const auto store = make_memory_store();
  Waker waker;
  const Config config({kLoopback});
  for (const int rank : {0, 1}) {  // rank 1 finds an address where rank 0 no longer is
    int asked = 0;
    const auto stop = [&] { return ++asked == 2; };
    const Error error = error_of(
        [&] { connect_tcp(world_of(rank, 2), *store, waker, config, {1 - rank}, {now_ns() + kLimit, stop, {}}); });
    EXPECT_EQ(error.kind(), ErrorKind::kAborted) << error.what();
    EXPECT_EQ(contains(error, "; rank 0 at "), rank == 1) << error.what();
  }
}

TEST(Tcp, InterfacesAreCheckedByName) {
  const auto store = make_memory_store();
  const Error error =
      error_of([&] { Rank(world_of(0, 1), *store, "PERSEUS_GLOO_NETWORK_INTERFACE=lo,no-such-if0", kSecond); });
  EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
  EXPECT_TRUE(contains(error, "no-such-if0")) << error.what();
  EXPECT_TRUE(contains(error, "PERSEUS_GLOO_NETWORK_INTERFACE")) << error.what();
  EXPECT_TRUE(contains(error, " lo")) << error.what();
}

TEST(Tcp, InterfacesAreNamedForNcclAndGlooToo) {
  const auto of = [](const std::string& variable) { return InterfaceChoice(Config({variable})); };
  const auto interfaces = [&](const std::string& variable) {
    std::vector<std::string> names;
    for (const InterfaceAddress& address : usable_addresses(of(variable)))
      if (names.empty() || names.back() != address.interface) names.push_back(address.interface);
    return names;
  };
  using Names = std::vector<std::string>;
  for (const char* variable : {"PERSEUS_GLOO_NETWORK_INTERFACE= lo ", "PERSEUS_NCCL_NETWORK_INTERFACE=lo,",
                               "HOROVOD_GLOO_IFACE=,lo", "GLOO_SOCKET_IFNAME=lo,lo", "NCCL_SOCKET_IFNAME=lo",
                               "NCCL_SOCKET_IFNAME=l", "NCCL_SOCKET_IFNAME==lo", "NCCL_SOCKET_IFNAME=l,lo"}) {
    EXPECT_EQ(interfaces(variable), Names{"lo"}) << variable;
    EXPECT_TRUE(of(variable).names_some()) << variable;
    EXPECT_EQ(interfaces_at_once(of(variable)), 1) << variable;
  }
  EXPECT_EQ(interfaces_at_once(of("GLOO_SOCKET_IFNAME=eth0, ,eth1,")), 2);
  const InterfaceChoice both(Config({"NCCL_SOCKET_IFNAME=eth0", "PERSEUS_GLOO_NETWORK_INTERFACE=lo"}));
  EXPECT_EQ(both.entries(), Names{"lo"}) << "Perseus' own variable wins";
  EXPECT_FALSE(both.by_prefix());

  const InterfaceChoice prefixes = of("NCCL_SOCKET_IFNAME=eth,ib1");
  EXPECT_TRUE(prefixes.allows("eth0") && prefixes.allows("eth17") && prefixes.allows("ib10"));
  EXPECT_FALSE(prefixes.allows("ib0") || prefixes.allows("veth0"));
  const InterfaceChoice exact = of("NCCL_SOCKET_IFNAME==eth0,ib1");
  EXPECT_TRUE(exact.allows("eth0") && exact.allows("ib1"));
  EXPECT_FALSE(exact.allows("eth01") || exact.allows("ib10"));
  for (const char* excluding : {"NCCL_SOCKET_IFNAME=^docker,lo", "NCCL_SOCKET_IFNAME=^=docker0,lo"}) {
    EXPECT_FALSE(of(excluding).names_some());
    EXPECT_TRUE(of(excluding).allows("eth0"));
    EXPECT_FALSE(of(excluding).allows("lo") || of(excluding).allows("docker0"));
    EXPECT_EQ(interfaces_at_once(of(excluding)), 1);
  }
  EXPECT_TRUE(of("NCCL_SOCKET_IFNAME=^=docker0").allows("docker01"));
  EXPECT_TRUE(of("GLOO_SOCKET_IFNAME=").allows("eth0"));

  const Error missing = error_of([&] { interfaces("NCCL_SOCKET_IFNAME=nosuch"); });
  EXPECT_EQ(missing.kind(), ErrorKind::kInvalidArgument);
  EXPECT_TRUE(contains(missing, "NCCL_SOCKET_IFNAME names 'nosuch…', which does not exist")) << missing.what();
  EXPECT_TRUE(contains(missing, "PERSEUS_GLOO_NETWORK_INTERFACE")) << missing.what();
  std::string everything = "NCCL_SOCKET_IFNAME=^";
  for (char first = 'a'; first <= 'z'; ++first) everything += std::string(1, first) + ',';
  EXPECT_TRUE(contains(error_of([&] { interfaces(everything); }), "leaves no interface that is up"));
}

// A rank that is stopped between connecting and saying who it is counts as an intruder after a while; it is late, not
// dead.
TEST(Tcp, RankStoppedWhileConnectingIsNotLost) {
  run_ranks(2, [](Rank& self) {
    Link& link = self.transport->link(1 - self.world.rank, {0, 0});
    if (self.world.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5500));
    Byte byte = 5;
    const iovec piece{&byte, 1};
    bool told = false, arrived = false;
    self.drive([&] {
      if (!told) told = link.try_send(&piece, 1) == 1;
      if (!arrived && link.recv_window(1)) arrived = true;
      return told && arrived;
    });
  });
}

// The wrong secret on one rank: nobody gets a connection with it, and everybody learns which rank it is.
TEST(Tcp, RankWithAnotherSecretIsNamed) {
  const auto store = make_memory_store();
  std::thread one([&] {
    World world = world_of(1, 2);
    world.secret = "another";
    wait_for_address(store.get(), 0);
    const Error error = error_of([&] { Rank(world, *store, kLoopback, 3 * kSecond); });
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_TRUE(contains(error, "rank 0")) << error.what();
    EXPECT_TRUE(contains(error, "secret")) << error.what();
  });
  // Longer than the other: it has to be there to refuse it.
  const Error error = error_of([&] { Rank(world_of(0, 2), *store, kLoopback, 6 * kSecond); });
  one.join();
  EXPECT_TRUE(contains(error, "rank 1")) << error.what();
}

}  // namespace
}  // namespace perseus

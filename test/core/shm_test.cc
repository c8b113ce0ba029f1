// The shared-memory transport by itself: how ranks of a host meet among pending connections, what descriptors they
// keep, and what happens when the kernel refuses memory, descriptors or room in a socket.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "net/socket.h"
#include "tcp_ranks.h"
#include "topology/host.h"
#include "transport/shared_segment.h"
#include "world.h"

namespace {

using namespace perseus;

struct Local {
  Waker waker;
  std::unique_ptr<Transport> transport;  // may be null
  std::string error;
};

// Connects `size` ranks, each on a thread of its own; before(rank) runs there first.
std::vector<std::unique_ptr<Local>> connect_all(int size, Store& store, const std::string& choice = "auto",
                                                const std::function<void(int)>& before = {}) {
  std::vector<std::unique_ptr<Local>> ranks;
  for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<Local>());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      if (before) before(rank);
      Local& self = *ranks[static_cast<size_t>(rank)];
      const Config config({"PERSEUS_TRANSPORT=" + choice});
      try {
        self.transport =
            connect_shm(world_of(rank, size), store, self.waker, config, {now_ns() + 20 * kSecond, {}, {}});
      } catch (const Error& error) {
        self.error = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// No descriptor can be opened while this lives.
class Exhausted {
 public:
  Exhausted() {
    getrlimit(RLIMIT_NOFILE, &old_);
    const int lowest = fcntl(0, F_DUPFD, 0);
    close(lowest);
    rlimit none = old_;
    none.rlim_cur = static_cast<rlim_t>(lowest);
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~Exhausted() { setrlimit(RLIMIT_NOFILE, &old_); }

 private:
  rlimit old_{};
};

// `count` numbers through a link, from one transport to another.
void expect_transfer(Local& from, int from_rank, Local& to, int to_rank, Channel channel) {
  Link& out = from.transport->link(to_rank, channel);
  Link& in = to.transport->link(from_rank, channel);
  constexpr size_t kBytes = 48;
  const Span window = out.send_window(kBytes);
  ASSERT_EQ(window.size, kBytes);
  for (size_t i = 0; i < kBytes; ++i) window.data[i] = value_at(from_rank, to_rank, channel.key(), i);
  out.send_commit(kBytes);
  const int64_t deadline = now_ns() + kLimit;
  ConstSpan got;
  while ((got = in.recv_window(kBytes)).size == 0) {
    ASSERT_LT(now_ns(), deadline) << "channel " << channel.key();
    from.transport->poll(true);
    to.transport->poll(true);
  }
  for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(got.data[i], value_at(from_rank, to_rank, channel.key(), i)) << i;
  in.recv_release(kBytes);
}

// Connections to a rank that say nothing: more than it keeps.
void knock(Store& store, int rank, std::vector<Socket>* silent) {
  constexpr int kConnections = 200;
  const std::string entry = store.get("job/7/shm/" + std::to_string(rank), now_ns() + kLimit);
  const std::string name = entry.substr(entry.find(' ') + 1);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  for (int i = 0; i < kConnections; ++i) {
    silent->emplace_back([] { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0); });
    ASSERT_EQ(connect(silent->back().fd(), reinterpret_cast<sockaddr*>(&address),
                      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
              0);
  }
}

TEST(Shm, SilentConnectionsDelayNoStart) {
  // Each of these used to be waited for, for 5 s, one after the other: longer than the start may take.
  const auto store = make_memory_store();
  std::vector<Socket> silent;
  const auto ranks = connect_all(3, *store, "auto", [&](int rank) {
    for (int other = 0; rank == 2 && other < 2; ++other) knock(*store, other, &silent);
  });
  for (const auto& rank : ranks) ASSERT_NE(rank->transport, nullptr) << rank->error;
  for (int a = 0; a < 3; ++a)
    for (int b = 0; b < 3; ++b)
      if (a != b) expect_transfer(*ranks[static_cast<size_t>(a)], a, *ranks[static_cast<size_t>(b)], b, Channel{0, 0});
}

// Lets silent connections arrive at rank 0 when all others have said hello and it has not looked yet.
class CrowdedStore : public Store {
 public:
  void set(const std::string& key, const std::string& value, int64_t deadline_ns,
           const Interrupted& interrupted) override {
    store_->set(key, value, deadline_ns, interrupted);
  }
  std::string get(const std::string& key, int64_t deadline_ns, const Interrupted& interrupted) override {
    return store_->get(key, deadline_ns, interrupted);
  }
  std::vector<int> get_all(const std::string& prefix, const std::vector<int>& numbers, int64_t deadline_ns,
                           const OnValue& on_value, const Interrupted&) override {
    const std::vector<int> missing = store_->get_all(prefix, numbers, deadline_ns, on_value);
    if (prefix == "job/7/shm/met/" && numbers == std::vector<int>{1}) knock(*store_, 0, &silent_);
    return missing;
  }
  std::vector<int> get_present(const std::string& prefix, const std::vector<int>& numbers, int64_t deadline_ns,
                               const OnValue& on_value, const Interrupted& interrupted) override {
    return store_->get_present(prefix, numbers, deadline_ns, on_value, interrupted);
  }

 private:
  const std::shared_ptr<Store> store_ = make_memory_store();
  std::vector<Socket> silent_;
};

TEST(Shm, ARankThatHasSaidHelloIsNotPushedOutByThoseBehindIt) {
  CrowdedStore store;
  const auto ranks = connect_all(2, store);
  for (const auto& rank : ranks) ASSERT_NE(rank->transport, nullptr) << rank->error;
  expect_transfer(*ranks[0], 0, *ranks[1], 1, Channel{0, 0});
}

TEST(Shm, LinksKeepNoDescriptors) {
  const auto store = make_memory_store();
  const auto ranks = connect_all(2, *store);
  ASSERT_NE(ranks[0]->transport, nullptr) << ranks[0]->error;
  const size_t before = open_descriptors();
  for (uint32_t group = 0; group < 40; ++group) {
    expect_transfer(*ranks[0], 0, *ranks[1], 1, Channel{group, kControlStream});
    expect_transfer(*ranks[1], 1, *ranks[0], 0, Channel{group, kControlStream});
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(Shm, WhatASocketHasNoRoomForIsSentLater) {
  // More rings than a socket takes while their receiver is busy elsewhere: nobody may block, and none may be lost.
  constexpr uint32_t kRings = 600;
  const auto store = make_memory_store();
  const auto ranks = connect_all(2, *store);
  ASSERT_NE(ranks[0]->transport, nullptr) << ranks[0]->error;
  for (uint32_t group = 0; group < kRings; ++group) ranks[0]->transport->link(1, Channel{group, kControlStream});
  ranks[0]->transport->send_control_message(1, "after all of them");
  for (uint32_t group = 0; group < kRings; ++group)
    ASSERT_NO_FATAL_FAILURE(expect_transfer(*ranks[0], 0, *ranks[1], 1, Channel{group, kControlStream}));
  PeerEvent event;
  const int64_t deadline = now_ns() + kLimit;
  while (!ranks[1]->transport->next_event(&event)) {
    ASSERT_LT(now_ns(), deadline);
    ranks[0]->transport->poll(true);
    ranks[1]->transport->poll(true);
  }
  EXPECT_EQ(event.text, "after all of them");
}

TEST(Shm, WhatARankSaidBeforeItLeftIsReadByWhoeverItDidNotHearOut) {
  // The kernel reports that unread messages were dropped (ECONNRESET) before it gives what lies in our own queue.
  const auto store = make_memory_store();
  const auto ranks = connect_all(2, *store);
  ASSERT_NE(ranks[0]->transport, nullptr) << ranks[0]->error;
  ranks[0]->transport->send_control_message(1, "never read");
  ranks[1]->transport->send_control_message(0, "goodbye");
  ranks[1]->transport.reset();
  ranks[0]->transport->poll(true);
  PeerEvent event;
  ASSERT_TRUE(ranks[0]->transport->next_event(&event));
  EXPECT_EQ(event.kind, PeerEvent::Kind::kControlMessage);
  EXPECT_EQ(event.text, "goodbye");
  ASSERT_TRUE(ranks[0]->transport->next_event(&event));
  EXPECT_EQ(event.kind, PeerEvent::Kind::kGone);
  EXPECT_FALSE(ranks[0]->transport->next_event(&event));
}

TEST(Shm, ASenderWithoutDescriptorsSaysSo) {
  if (perseus_test::kSanitizer) GTEST_SKIP() << "sanitizers need descriptors themselves, to look at an exception";
  const auto store = make_memory_store();
  const auto ranks = connect_all(2, *store);
  ASSERT_NE(ranks[0]->transport, nullptr) << ranks[0]->error;
  const Exhausted exhausted;
  const Error error = error_of([&] { ranks[0]->transport->link(1, Channel{0, 0}); });
  EXPECT_TRUE(contains(error, "descriptors that its limit allows")) << error.what();
  EXPECT_TRUE(contains(error, "ulimit -n")) << error.what();
  EXPECT_FALSE(contains(error, "memory limit")) << error.what();
}

TEST(Shm, AReceiverWithoutDescriptorsSaysSo) {
  if (perseus_test::kSanitizer) GTEST_SKIP() << "sanitizers need descriptors themselves, to look at an exception";
  const auto store = make_memory_store();
  const auto ranks = connect_all(2, *store);
  ASSERT_NE(ranks[0]->transport, nullptr) << ranks[0]->error;
  ranks[0]->transport->link(1, Channel{0, 0});
  const Exhausted exhausted;
  const Error error = error_of([&] { ranks[1]->transport->poll(true); });
  EXPECT_TRUE(contains(error, "memory that rank 0 passed")) << error.what();
  EXPECT_TRUE(contains(error, "descriptors that its limit allows")) << error.what();
}

TEST(Shm, RanksOfAnotherUserAreNotReached) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root: one rank becomes another user";
  for (int outsider : {0, 1, 2}) {
    const auto store = make_memory_store();
    testing::internal::CaptureStderr();
    const auto ranks = connect_all(3, *store, "auto", [&](int rank) {
      if (rank == outsider) syscall(SYS_setresuid, -1, 65534, -1);  // of this thread alone
    });
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("(it runs as another user): TCP is used there"), std::string::npos) << said;
    for (int a = 0; a < 3; ++a) {
      const Local& self = *ranks[static_cast<size_t>(a)];
      ASSERT_NE(self.transport, nullptr) << self.error;
      for (int b = 0; b < 3; ++b)
        EXPECT_EQ(self.transport->reaches(b), a != b && a != outsider && b != outsider) << a << " and " << b;
    }
  }
}

TEST(Shm, AForkedChildUnmapsNothingOfItsOwn) {
  SharedSegment segment(4096);
  const int fd = segment.fd();
  const pid_t child = fork();
  if (child == 0) {
    // The number of the descriptor and the place of the memory, both of which are free in a child, are taken again.
    if (dup2(0, fd) != fd) _exit(1);
    void* at =
        mmap(segment.data(), 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (at != segment.data()) _exit(2);
    *static_cast<volatile char*>(at) = 'x';
    {
      const SharedSegment gone(std::move(segment));
    }
    unsigned char resident = 0;
    if (mincore(at, 4096, &resident) != 0) _exit(3);  // ENOMEM: unmapped
    if (fcntl(fd, F_GETFD) < 0) _exit(4);
    _exit(*static_cast<volatile char*>(at) == 'x' ? 77 : 5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 77);
}

TEST(Shm, ALimitOnFileSizesIsAnErrorAndNoSignal) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_DFL);
    const rlimit limit{4096, 4096};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(1);
    try {
      const SharedSegment segment(1 << 20);
    } catch (const Error& error) {
      _exit(std::string(error.what()).find("limit on file sizes (ulimit -f)") != std::string::npos ? 77 : 2);
    }
    _exit(3);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 77);
}

// The identity of a host with this name whose kernel shows no boot id; "" without the right to make one.
std::string identity_without_boot_id(const std::string& name) {
  int ends[2];
  if (pipe(ends) != 0) return "";
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWNS | CLONE_NEWUTS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("/dev/null", "/proc/sys/kernel/random/boot_id", nullptr, MS_BIND, nullptr) != 0 ||
        sethostname(name.data(), name.size()) != 0)
      _exit(1);
    const std::string identity = host_identity();
    _exit(write(ends[1], identity.data(), identity.size()) < 0);
  }
  close(ends[1]);
  char text[512];
  const ssize_t size = read(ends[0], text, sizeof text);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return std::string(text, size > 0 ? static_cast<size_t>(size) : 0);
}

TEST(Shm, HostsWithoutABootIdDifferByTheirNames) {
  const std::string first = identity_without_boot_id("first");
  if (first.empty()) GTEST_SKIP() << "needs root: a host without a boot id";
  EXPECT_NE(first, identity_without_boot_id("second"));
  EXPECT_EQ(first, identity_without_boot_id("first"));
}

}  // namespace

// Ranks as threads, each with a TCP transport, for the tests of that transport. Test code only.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/config.h"
#include "base/error.h"
#include "bootstrap/store.h"
#include "error_of.h"
#include "net/waker.h"
#include "transport/transport.h"

namespace perseus {

constexpr int64_t kLimit = 120 * kSecond;

inline const char* const kLoopback = "PERSEUS_GLOO_NETWORK_INTERFACE=lo";

inline World world_of(int rank, int size) {
  World world;
  world.rank = rank;
  world.size = size;
  world.epoch = 7;
  world.secret = "the job's secret";
  world.job = "job";
  return world;
}

inline std::vector<int> others(int rank, int size) {
  std::vector<int> peers;
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) peers.push_back(peer);
  return peers;
}

// One rank: a waker and the transport on it.
struct Rank {
  World world;
  Waker waker;
  std::unique_ptr<Transport> transport;

  Rank(const World& w, Store& store, const std::string& interfaces = kLoopback, int64_t limit_ns = kLimit) : world(w) {
    const Config config({interfaces, "PERSEUS_LOG_LEVEL=error"});
    transport = connect_tcp(world, store, waker, config, others(w.rank, w.size), {now_ns() + limit_ns, {}, {}});
  }

  // Drives until `ready`, spinning and now and then sleeping as an engine does; fails the test after kLimit.
  void drive(const std::function<bool()>& ready) {
    const int64_t deadline = now_ns() + kLimit;
    for (uint64_t pass = 0; now_ns() < deadline; ++pass) {
      transport->poll(waker.take_events());
      if (ready()) return;
      if (pass % 64 != 63) continue;
      waker.prepare_sleep();
      transport->poll(false);
      if (ready()) return waker.cancel_sleep();
      waker.wait(kSecond);
    }
    FAIL() << "rank " << world.rank << " waited too long";
  }
};

// Runs body(rank) on `size` threads, each with its transport.
inline void run_ranks(int size, const std::function<void(Rank&)>& body) {
  const auto store = make_memory_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        Rank self(world_of(rank, size), *store);
        body(self);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
}

inline Byte value_at(int from, int to, uint64_t channel, uint64_t index) {
  const uint64_t mixed = (index + 1) * 0x9e3779b97f4a7c15ull + channel * 77 + static_cast<uint64_t>(from * 31 + to);
  return static_cast<Byte>(mixed >> 29);
}

// A transfer of messages of agreed odd sizes in both directions of one link, in any mix of the two ways to receive.
class Conversation {
 public:
  Conversation(int me, Transport& transport, int peer, Channel channel, size_t bytes)
      : link_(transport.link(peer, channel)), channel_(channel), out_(bytes), in_(bytes) {
    const size_t most = channel.stream >= kControlStream ? kMaxControlMessage : kMaxMessage;
    std::mt19937 random(static_cast<unsigned>(channel.key()));  // the same sizes on both ends
    for (size_t left = bytes; left > 0; left -= sizes_.back())
      sizes_.push_back(std::min<size_t>(left, 1 + random() % (random() % 3 == 0 ? 100 : most)));
    for (size_t i = 0; i < bytes; ++i) out_[i] = value_at(me, peer, channel.key(), i);
    expected_.resize(bytes);
    for (size_t i = 0; i < bytes; ++i) expected_[i] = value_at(peer, me, channel.key(), i);
  }

  void step() {
    send();
    receive();
  }
  bool done() const { return sent_ == out_.size() && received_ == in_.size(); }
  bool exact() const { return in_ == expected_; }

 private:
  void send() {
    if (sent_ == out_.size()) return;
    // Three pieces, one of them empty, cut at odd places.
    const size_t left = std::min<size_t>(out_.size() - sent_, 200'001);
    const size_t first = left / 3;
    const iovec pieces[3] = {{&out_[sent_], first}, {nullptr, 0}, {out_.data() + sent_ + first, left - first}};
    sent_ += link_.try_send(pieces, 3);
  }

  void receive() {
    if (message_ == sizes_.size()) return;
    const size_t size = sizes_[message_];
    if (message_ % 2 == 0) {
      const ConstSpan window = link_.recv_window(size);
      if (!window) return;
      ASSERT_EQ(window.size, size);
      std::copy(window.data, window.data + size, in_.begin() + static_cast<ptrdiff_t>(received_));
      link_.recv_release(size);
      received_ += size;
      ++message_;
      return;
    }
    const size_t left = size - part_, first = left / 2;
    const iovec pieces[2] = {{in_.data() + received_, first}, {in_.data() + received_ + first, left - first}};
    const size_t got = link_.try_recv(pieces, 2);
    received_ += got;
    part_ += got;
    if (part_ == size) part_ = 0, ++message_;
  }

  Link& link_;
  const Channel channel_;
  std::vector<Byte> out_, in_, expected_;
  std::vector<size_t> sizes_;
  size_t sent_ = 0, received_ = 0, message_ = 0, part_ = 0;
};

}  // namespace perseus

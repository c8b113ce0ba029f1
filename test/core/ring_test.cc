// The ring of bytes: messages arrive whole, in order and in one piece, whatever their sizes and whoever is faster.
#include "transport/ring.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

namespace {

using namespace perseus;

struct Ring {
  explicit Ring(size_t capacity) : memory(std::aligned_alloc(64, kRingHeaderBytes + capacity)), capacity(capacity) {
    std::memset(memory, 0, kRingHeaderBytes + capacity);
  }
  ~Ring() { std::free(memory); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  RingProducer producer() { return RingProducer(memory, capacity); }
  RingConsumer consumer() { return RingConsumer(memory, capacity); }

  void* memory;
  size_t capacity;
};

TEST(Ring, ZeroBytesAreAnEmptyRing) {
  Ring ring(1024);
  RingConsumer consumer = ring.consumer();
  for (size_t n : {1, 64, 1024}) EXPECT_FALSE(consumer.window(n));
}

TEST(Ring, AMessageAppearsOnlyOnceItIsCommitted) {
  Ring ring(1024);
  RingProducer producer = ring.producer();
  RingConsumer consumer = ring.consumer();
  const Span window = producer.window(100);
  ASSERT_TRUE(window);
  std::memset(window.data, 7, 100);
  EXPECT_FALSE(consumer.window(100));
  producer.commit(100);
  const ConstSpan seen = consumer.window(100);
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen.data[99], 7);
  EXPECT_EQ(consumer.window(100).data, seen.data) << "the same until it is released";
  consumer.release(100);
  EXPECT_FALSE(consumer.window(100));
}

TEST(Ring, AFullRingRefusesUntilSomethingIsReleased) {
  Ring ring(1024);
  RingProducer producer = ring.producer();
  RingConsumer consumer = ring.consumer();
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(producer.window(256)) << i;
    producer.commit(256);
  }
  EXPECT_FALSE(producer.window(1));
  ASSERT_TRUE(consumer.window(256));
  EXPECT_FALSE(producer.window(1)) << "read, but not released";
  consumer.release(256);
  EXPECT_TRUE(producer.window(256));
  EXPECT_FALSE(producer.window(257));
}

TEST(Ring, MessagesStartOnCacheLinesAndNeverCrossTheEnd) {
  Ring ring(4096);
  RingProducer producer = ring.producer();
  RingConsumer consumer = ring.consumer();
  std::mt19937 random(1);
  const auto* begin = static_cast<const Byte*>(ring.memory) + kRingHeaderBytes;
  for (int i = 0; i < 10000; ++i) {
    const size_t n = 1 + random() % 2048;  // half the ring always fits in spite of the gap at the end
    const Span window = producer.window(n);
    ASSERT_TRUE(window) << n;
    const size_t offset = static_cast<size_t>(window.data - begin);
    ASSERT_EQ(offset % kRingAlign, 0u);
    ASSERT_LE(offset + n, 4096u);
    producer.commit(n);
    ASSERT_EQ(consumer.window(n).data, window.data) << "both ends skip the same gap";
    consumer.release(n);
  }
}

TEST(Ring, TwoThreadsExchangeEveryByteInOrder) {
  Ring ring(kControlRingBytes);
  constexpr int kMessages = 20000;
  const auto size_of_next = [](std::mt19937& random) { return 1 + random() % (random() % 50 == 0 ? 8000u : 300u); };
  std::thread sender([&] {
    RingProducer producer = ring.producer();
    std::mt19937 random(3);
    for (int i = 0; i < kMessages; ++i) {
      const size_t n = size_of_next(random);
      Span window;
      while (!(window = producer.window(n))) std::this_thread::yield();
      for (size_t at = 0; at < n; ++at) window.data[at] = static_cast<Byte>(i * 31 + static_cast<int>(at));
      producer.commit(n);
    }
  });
  RingConsumer consumer = ring.consumer();
  std::mt19937 random(3);
  for (int i = 0; i < kMessages; ++i) {
    const size_t n = size_of_next(random);
    ConstSpan window;
    while (!(window = consumer.window(n))) std::this_thread::yield();
    size_t wrong = 0;
    for (size_t at = 0; at < n; ++at) wrong += window.data[at] != static_cast<Byte>(i * 31 + static_cast<int>(at));
    EXPECT_EQ(wrong, 0u) << "message " << i;
    consumer.release(n);
  }
  sender.join();
}

TEST(Ring, DataRingsHoldWhatThePipelineNeeds) {
  EXPECT_GE(ring_capacity(0), size_t{512} * 1024);
  EXPECT_EQ(ring_capacity(kControlStream), kControlRingBytes);
  EXPECT_GE(kControlRingBytes, 2 * kMaxControlMessage);
}

}  // namespace

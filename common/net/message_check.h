// What follows messages of a connection, so that their receiver notices when they have changed on the way. One
// direction of a connection has one on each end, which sees the same messages in the same order; not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "net/siphash.h"

namespace perseus {

class MessageCheck {
 public:
  virtual ~MessageCheck() = default;
  // How many bytes follow each header and each message, at most 8.
  virtual size_t size() const = 0;
  // The next message, of n bytes, which add() then gets in order.
  virtual void begin(size_t n) = 0;
  virtual void add(const void* data, size_t n) = 0;
  // What follows the message, in the low size() bytes.
  virtual uint64_t finish() = 0;
  // Error(kIo) about a message of n bytes from `peer`, behind which `sent` came instead of `found`.
  [[noreturn]] virtual void refuse(size_t n, const std::string& peer, uint64_t found, uint64_t sent) const = 0;
};

// CRC32C: finds what goes wrong by chance.
class Checksum final : public MessageCheck {
 public:
  size_t size() const override { return 4; }
  void begin(size_t) override { sum_ = 0; }
  void add(const void* data, size_t n) override;
  uint64_t finish() override { return sum_; }
  [[noreturn]] void refuse(size_t n, const std::string& peer, uint64_t found, uint64_t sent) const override;

 private:
  uint32_t sum_ = 0;
};

// SipHash of the message's number, its size and its bytes: also finds what somebody who does not know the key has
// changed, repeated, left out or put in.
class AuthenticationCode final : public MessageCheck {
 public:
  static constexpr size_t kBytes = 8;

  explicit AuthenticationCode(const Digest& key) : hash_(key) {}

  size_t size() const override { return kBytes; }
  void begin(size_t n) override;
  void add(const void* data, size_t n) override { hash_.add(data, n); }
  uint64_t finish() override { return hash_.finish(); }
  [[noreturn]] void refuse(size_t n, const std::string& peer, uint64_t found, uint64_t sent) const override;
  // What refuse() says, for those that end a connection in their own way.
  static std::string refusal(size_t n);
  // What follows the next message, which is `first` and then `second`.
  std::string behind(std::string_view first, std::string_view second = {});

 private:
  SipHash hash_;
  uint64_t number_ = 0;  // of the message
};

}  // namespace perseus

// What fuzz targets share. Each is a file with LLVMFuzzerTestOneInput(): it takes bytes that somebody else may have
// written, gives them to a parser, and ends the process where that does what it must not. Whatever a parser throws as
// Error is what it is meant to do.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "transport/transport.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace perseus_fuzz {

// Not assert(): release builds are fuzzed, too.
inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expected: %s\n", what);
  std::abort();
}

// The input, which choices are taken off from the front; zeros once it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), left_(size) {}
  size_t left() const { return left_; }
  const uint8_t* data() const { return at_; }
  uint8_t byte() { return value<uint8_t>(); }
  // Below `choices`.
  size_t choice(size_t choices) { return value<uint16_t>() % choices; }
  template <typename T>
  T value() {
    T result{};
    const size_t bytes = std::min(left_, sizeof result);
    if (bytes > 0) std::memcpy(&result, at_, bytes);
    skip(bytes);
    return result;
  }
  void skip(size_t bytes) {
    at_ += bytes;
    left_ -= bytes;
  }
  std::vector<uint8_t> take(size_t bytes) {
    bytes = std::min(bytes, left_);
    std::vector<uint8_t> taken(at_, at_ + bytes);
    skip(bytes);
    return taken;
  }
  // What follows a genuine header, with some of its bytes changed: a fuzzer would take long to find what only says
  // that the rest is ours.
  template <typename Header>
  Header changed(Header header) {
    uint8_t bytes[sizeof header];
    std::memcpy(bytes, &header, sizeof header);
    for (size_t changes = choice(4); changes > 0; --changes) {
      const size_t at = choice(sizeof header);
      bytes[at] = byte();
    }
    std::memcpy(&header, bytes, sizeof header);
    return header;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

// A link on which the other side says what the input has, and takes whatever it is told.
class PlayedLink final : public perseus::Link {
 public:
  explicit PlayedLink(bool windows) : windows_(windows) {}
  void say(const void* bytes, size_t size) {
    const uint8_t* const first = static_cast<const uint8_t*>(bytes);
    said_.insert(said_.end(), first, first + size);
  }

  bool has_windows() const override { return windows_; }
  perseus::Span send_window(size_t n) override {
    room_.resize(n);  // exactly, so that a write behind it is found
    room_.shrink_to_fit();
    return {room_.data(), n};
  }
  void send_commit(size_t) override {}
  size_t try_send(const iovec* pieces, int count) override {
    size_t total = 0;
    for (int i = 0; i < count; ++i) {
      room_.assign(static_cast<const uint8_t*>(pieces[i].iov_base),
                   static_cast<const uint8_t*>(pieces[i].iov_base) + pieces[i].iov_len);
      total += pieces[i].iov_len;
    }
    return total;
  }
  perseus::ConstSpan recv_window(size_t n) override {
    expect(n > 0 && n <= perseus::kMaxMessage, "a message of a size that links carry");
    if (said_.size() - at_ < n) return {};
    window_.assign(said_.begin() + static_cast<std::ptrdiff_t>(at_),
                   said_.begin() + static_cast<std::ptrdiff_t>(at_ + n));
    window_.shrink_to_fit();
    return {window_.data(), n};
  }
  void recv_release(size_t n) override { at_ += n; }
  size_t try_recv(const iovec* pieces, int count) override {
    size_t total = 0;
    for (int i = 0; i < count; ++i) {
      const size_t n = std::min(pieces[i].iov_len, said_.size() - at_);
      if (n > 0) std::memcpy(pieces[i].iov_base, said_.data() + at_, n);
      at_ += n;
      total += n;
    }
    return total;
  }

 private:
  const bool windows_;
  std::vector<uint8_t> said_, window_, room_;
  size_t at_ = 0;
};

}  // namespace perseus_fuzz

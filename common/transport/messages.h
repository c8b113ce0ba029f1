// Messages over one direction of a link: an optional header, then messages whose sizes both ends know. Hides whether
// the link lends windows of memory that both ends share, or carries a stream of bytes, and adds and verifies the
// checksums of links that ask for them: 4 bytes, CRC32C, behind every header and every message. Resumable: no call
// blocks, and what a call could not move, the next one moves.
#pragma once

#include <cstdint>
#include <vector>

#include "base/progress_lock.h"
#include "transport/pieces.h"
#include "transport/transport.h"

namespace perseus {

// No message of an exchange is larger, and a larger range travels in messages of this size.
constexpr size_t kChunkBytes = 64 * 1024;
static_assert(kChunkBytes <= kMaxMessage, "a chunk is one message");

enum class Moved : uint8_t { kNothing, kSome, kAll };  // of the message, and of the header before it

class MessageSender {
 public:
  MessageSender() = default;
  explicit MessageSender(Link* link) : link_(link), windows_(link->has_windows()), checked_(link->checked()) {}

  // `header` goes before the first message and must stay until it has gone. Only between messages.
  void start(const void* header, size_t bytes) PERSEUS_REQUIRES(progress_lock);
  // The header need not go any more.
  void drop_header() PERSEUS_REQUIRES(progress_lock) { header_left_ = header_sum_.left = 0; }
  bool header_gone() const PERSEUS_REQUIRES(progress_lock) { return header_left_ + header_sum_.left == 0; }

  // Moves what the link takes of the header and of a message of n bytes, which begins at `source`: its in side where
  // `from_in`, else its out side. Advances `source`. n = 0: only the header, and nothing where that has gone. The
  // same n must be given until kAll.
  Moved send(size_t n, Cursor* source, bool from_in) PERSEUS_REQUIRES(progress_lock);

  // Can messages be composed where the receiver reads them? Then room() gives that place, empty while there is none
  // free, and commit() sends the message. Only after the header.
  bool composes_in_place() const { return windows_; }
  Span room(size_t n) PERSEUS_REQUIRES(progress_lock) { return link_->send_window(n); }
  void commit(size_t n) PERSEUS_REQUIRES(progress_lock) { link_->send_commit(n); }

  // How many messages may be under way beyond the one that the receiver works on, to each of so many peers at once.
  uint64_t depth(size_t peers) const;
  // In messages of what size a long run travels best: a ring holds several chunks, of a stream each costs a system
  // call.
  size_t best_message_bytes() const { return windows_ ? kChunkBytes : kMaxMessage; }

 private:
  Moved send_windowed(size_t n, Cursor* source, bool from_in) PERSEUS_REQUIRES(progress_lock);
  Moved send_streamed(size_t n, Cursor* source, bool from_in) PERSEUS_REQUIRES(progress_lock);
  void sum_up(size_t n, Cursor source, bool from_in) PERSEUS_REQUIRES(progress_lock);

  // A checksum on its way.
  struct Sum {
    uint32_t value = 0;
    size_t left = 0;  // bytes that have not gone
    iovec piece() { return {reinterpret_cast<Byte*>(&value) + sizeof value - left, left}; }
  };

  Link* link_ = nullptr;
  bool windows_ = false, checked_ = false;
  const Byte* header_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;  // what is left of it
  size_t header_left_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  size_t moved_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // bytes of the message that a stream has taken so far
  Sum header_sum_ PERSEUS_GUARDED_BY(progress_lock);
  Sum sum_ PERSEUS_GUARDED_BY(progress_lock);  // of the message that a stream is to take
};

class MessageReceiver {
 public:
  MessageReceiver() = default;
  explicit MessageReceiver(Link* link) : link_(link), windows_(link->has_windows()), checked_(link->checked()) {}

  void start() PERSEUS_REQUIRES(progress_lock) { moved_ = found_ = 0; }
  // Does a look for what has come cost next to nothing? Else it costs a system call, and the Waker reports what comes;
  // of what comes through shared memory it reports nothing while its owner is awake.
  bool looks_for_free() const { return windows_; }
  // Has the whole header come? Then it is copied to `header` and gone from the link.
  bool take_header(void* header, size_t bytes) PERSEUS_REQUIRES(progress_lock);

  // A message of n bytes once all of it is here, in the link's own memory until release(n). Where its checksum says
  // something else, Error(kIo), as in take_header() and receive().
  ConstSpan whole(size_t n) PERSEUS_REQUIRES(progress_lock);
  void release(size_t n) PERSEUS_REQUIRES(progress_lock);
  // The same, not verified yet: whole() does that.
  ConstSpan unverified(size_t n) PERSEUS_REQUIRES(progress_lock);
  // Drops a message of n bytes once all of it is here: whatever it was, nobody looks at it.
  bool skip(size_t n) PERSEUS_REQUIRES(progress_lock);

  // Moves what has come of a message of n bytes to the out side of `target` and advances it. `around_cache`: see
  // kernels::copy. Until kAll, n must stay the same.
  Moved receive(size_t n, Cursor* target, bool around_cache) PERSEUS_REQUIRES(progress_lock);

 private:
  Moved receive_windowed(size_t n, Cursor* target, bool around_cache) PERSEUS_REQUIRES(progress_lock);
  Moved receive_streamed(size_t n, Cursor* target) PERSEUS_REQUIRES(progress_lock);
  size_t sum_bytes() const { return checked_ ? sizeof sum_ : 0; }
  void verify(size_t n, uint32_t found, uint32_t sent) const;

  Link* link_ = nullptr;
  bool windows_ = false, checked_ = false;
  bool verified_ PERSEUS_GUARDED_BY(progress_lock) = false;  // the message that whole() has shown
  // Of the message that receive() moves: bytes that a stream has given so far, their checksum, and the one behind them.
  size_t moved_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  uint32_t found_ PERSEUS_GUARDED_BY(progress_lock) = 0, sum_ PERSEUS_GUARDED_BY(progress_lock) = 0;
};

}  // namespace perseus

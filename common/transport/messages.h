// Messages over one direction of a link: an optional header, then messages whose sizes both ends know. Hides whether
// the link lends windows of memory that both ends share, or carries a stream of bytes, and adds and verifies what links
// want behind every header and every message (net/message_check.h). Resumable: no call blocks, and what a call
// could not move, the next one moves.
#pragma once

#include <cstdint>
#include <vector>

#include "base/progress_lock.h"
#include "net/message_check.h"
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
  explicit MessageSender(Link* link) : link_(link), windows_(link->has_windows()), check_(link->outgoing_check()) {}

  // `header` goes before the first message and must stay until it has gone. Only between messages.
  void start(const void* header, size_t bytes) PERSEUS_REQUIRES(progress_lock);
  // The header need not go any more. Not for links with authentication codes, whose receivers count headers.
  void drop_header() PERSEUS_REQUIRES(progress_lock) { header_left_ = header_check_.left = 0; }
  bool header_gone() const PERSEUS_REQUIRES(progress_lock) { return header_left_ + header_check_.left == 0; }

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
  void compute_check(size_t n, Cursor source, bool from_in) PERSEUS_REQUIRES(progress_lock);

  // What follows a header or a message, on its way.
  struct Behind {
    uint64_t value = 0;  // its low `size` bytes
    size_t size = 0;
    size_t left = 0;  // bytes that have not gone
    iovec piece() { return {reinterpret_cast<Byte*>(&value) + size - left, left}; }
  };
  Behind finished_check() PERSEUS_REQUIRES(progress_lock);

  Link* link_ = nullptr;
  bool windows_ = false;
  MessageCheck* check_ = nullptr;                                   // of the link, null = none
  const Byte* header_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;  // what is left of it
  size_t header_left_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  size_t moved_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // bytes of the message that a stream has taken so far
  Behind header_check_ PERSEUS_GUARDED_BY(progress_lock);
  Behind message_check_ PERSEUS_GUARDED_BY(progress_lock);  // of the message that a stream is to take
};

class MessageReceiver {
 public:
  MessageReceiver() = default;
  explicit MessageReceiver(Link* link) : link_(link), windows_(link->has_windows()), check_(link->incoming_check()) {}

  void start() PERSEUS_REQUIRES(progress_lock) { moved_ = behind_ = 0; }
  // Does a look for what has come cost next to nothing? Else it costs a system call, and the Waker reports what comes;
  // of what comes through shared memory it reports nothing while its owner is awake.
  bool looks_for_free() const { return windows_; }
  // Has the whole header come? Then it is copied to `header` and gone from the link.
  bool take_header(void* header, size_t bytes) PERSEUS_REQUIRES(progress_lock);

  // A message of n bytes once all of it is here, in the link's own memory until release(n). Like take_header() and
  // receive(), it throws Error(kIo) if what follows the message is wrong.
  ConstSpan whole(size_t n) PERSEUS_REQUIRES(progress_lock);
  void release(size_t n) PERSEUS_REQUIRES(progress_lock);
  // The same, not verified yet: whole() does that.
  ConstSpan unverified(size_t n) PERSEUS_REQUIRES(progress_lock);
  // Drops a message of n bytes once all of it is here: whatever it was, nobody looks at it. Not for links with
  // authentication codes, which count messages.
  bool skip(size_t n) PERSEUS_REQUIRES(progress_lock);

  // Moves what has come of a message of n bytes to the out side of `target` and advances it. `around_cache`: see
  // kernels::copy. Until kAll, n must stay the same.
  Moved receive(size_t n, Cursor* target, bool around_cache) PERSEUS_REQUIRES(progress_lock);

 private:
  Moved receive_windowed(size_t n, Cursor* target, bool around_cache) PERSEUS_REQUIRES(progress_lock);
  Moved receive_streamed(size_t n, Cursor* target) PERSEUS_REQUIRES(progress_lock);
  size_t check_bytes() const { return check_ != nullptr ? check_->size() : 0; }
  void verify(size_t n, uint64_t sent) const;

  Link* link_ = nullptr;
  bool windows_ = false;
  MessageCheck* check_ = nullptr;                            // of the link, null = none
  bool verified_ PERSEUS_GUARDED_BY(progress_lock) = false;  // the message that whole() has shown
  // Of the message that receive() moves: bytes that a stream has given so far, and what follows it.
  size_t moved_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  uint64_t behind_ PERSEUS_GUARDED_BY(progress_lock) = 0;
};

}  // namespace perseus

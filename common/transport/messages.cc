// The only code above transports that tells links with windows from those with streams.
#include "transport/messages.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/kernels.h"

namespace perseus {
namespace {

constexpr int kMostPieces = 32;  // of one gathered send or receive

// Rings hold 2 * depth + 2 chunks and the gap at their end; sockets buffer more, but what all peers send to one rank at
// once meets in one queue of the network, and what overflows there is sent again.
constexpr uint64_t kWindowDepth = 2;
constexpr uint64_t kStreamDepth = 8, kLeastStreamDepth = 2;  // of all peers together; of each
static_assert((2 * kWindowDepth + 3) * kChunkBytes <= 512 * 1024, "see the argument in collective/exchange.h");

}  // namespace

uint64_t MessageSender::depth(size_t peers) const {
  return windows_ ? kWindowDepth : std::max(kLeastStreamDepth, kStreamDepth / std::max<size_t>(1, peers));
}

Moved MessageSender::send(size_t n, Cursor* source, bool from_in) {
  return windows_ ? send_windowed(n, source, from_in) : send_streamed(n, source, from_in);
}

Moved MessageSender::send_windowed(size_t n, Cursor* source, bool from_in) {
  Moved moved = Moved::kNothing;
  if (header_left_ > 0) {
    const Span window = link_->send_window(header_left_);
    if (!window) return Moved::kNothing;
    std::memcpy(window.data, header_, header_left_);
    link_->send_commit(header_left_);
    header_left_ = 0;
    moved = n == 0 ? Moved::kAll : Moved::kSome;
  }
  if (n == 0) return moved;
  const Span window = link_->send_window(n);
  if (!window) return moved;
  for (size_t done = 0; done < n;) {
    const size_t run = std::min(n - done, source->contiguous());
    kernels::copy(window.data + done, from_in ? source->in() : source->out(), run, false);
    source->advance(run);
    done += run;
  }
  link_->send_commit(n);
  return Moved::kAll;
}

void MessageSender::start(const void* header, size_t bytes) {
  header_ = static_cast<const Byte*>(header);
  header_left_ = bytes;
  moved_ = message_check_.left = 0;
  header_check_ = Behind();
  if (check_ == nullptr || bytes == 0) return;
  check_->begin(bytes);
  check_->add(header, bytes);
  header_check_ = finished_check();
}

MessageSender::Behind MessageSender::finished_check() { return {check_->finish(), check_->size(), check_->size()}; }

void MessageSender::compute_check(size_t n, Cursor source, bool from_in) {
  check_->begin(n);
  for (size_t done = 0; done < n;) {
    const size_t run = std::min(n - done, source.contiguous());
    check_->add(from_in ? source.in() : source.out(), run);
    source.advance(run);
    done += run;
  }
  message_check_ = finished_check();
}

Moved MessageSender::send_streamed(size_t n, Cursor* source, bool from_in) {
  if (check_ != nullptr && n > 0 && moved_ == 0 && message_check_.left == 0) compute_check(n, *source, from_in);
  iovec pieces[kMostPieces + 3];
  int count = 0;
  // The header and the first bytes leave in one packet.
  if (header_left_ > 0) pieces[count++] = iovec{const_cast<Byte*>(header_), header_left_};
  if (header_check_.left > 0) pieces[count++] = header_check_.piece();
  const int before = count;
  if (n > moved_)
    count += from_in ? source->gather_in(n - moved_, pieces + count, kMostPieces)
                     : source->gather_out(n - moved_, pieces + count, kMostPieces);
  if (n > 0 && message_check_.left > 0 && moved_ + total_bytes(pieces + before, count - before) == n)
    pieces[count++] = message_check_.piece();
  if (count == 0) return Moved::kNothing;
  size_t sent = link_->try_send(pieces, count);
  if (sent == 0) return Moved::kNothing;
  const auto take = [&sent](size_t most) {
    const size_t taken = std::min(sent, most);
    sent -= taken;
    return taken;
  };
  const size_t of_header = take(header_left_);
  header_ += of_header;
  header_left_ -= of_header;
  header_check_.left -= take(header_check_.left);
  const size_t of_message = n > moved_ ? take(n - moved_) : 0;
  if (of_message > 0) source->advance(of_message);
  moved_ += of_message;
  if (n > 0) message_check_.left -= take(message_check_.left);
  if (!header_gone() || moved_ < n || (n > 0 && message_check_.left > 0)) return Moved::kSome;
  moved_ = 0;
  return Moved::kAll;
}

// Compares what check_ has been given, a message of n bytes, with what came behind it.
void MessageReceiver::verify(size_t n, uint64_t sent) const {
  const uint64_t found = check_->finish();
  if (found != sent) check_->refuse(n, link_->peer_text(), found, sent);
}

ConstSpan MessageReceiver::unverified(size_t n) {
  const ConstSpan window = link_->recv_window(n + check_bytes());
  return window ? ConstSpan(window.data, n) : window;
}

ConstSpan MessageReceiver::whole(size_t n) {
  const ConstSpan window = unverified(n);
  if (window && check_ != nullptr && !verified_) {
    uint64_t sent = 0;
    std::memcpy(&sent, window.data + n, check_->size());
    check_->begin(n);
    check_->add(window.data, n);
    verify(n, sent);
    verified_ = true;
  }
  return window;
}

void MessageReceiver::release(size_t n) {
  link_->recv_release(n + check_bytes());
  verified_ = false;
}

bool MessageReceiver::skip(size_t n) {
  if (!link_->recv_window(n + check_bytes())) return false;
  release(n);
  return true;
}

bool MessageReceiver::take_header(void* header, size_t bytes) {
  const ConstSpan window = whole(bytes);
  if (!window) return false;
  std::memcpy(header, window.data, bytes);
  release(bytes);
  return true;
}

Moved MessageReceiver::receive(size_t n, Cursor* target, bool around_cache) {
  return windows_ ? receive_windowed(n, target, around_cache) : receive_streamed(n, target);
}

Moved MessageReceiver::receive_streamed(size_t n, Cursor* target) {
  iovec pieces[kMostPieces + 1];
  const size_t left = n > moved_ ? n - moved_ : 0;
  int count = left > 0 ? target->gather_out(left, pieces, kMostPieces) : 0;
  if (check_ != nullptr && total_bytes(pieces, count) == left) {
    const size_t behind = moved_ + left - n;  // bytes of what follows that have come
    pieces[count++] = iovec{reinterpret_cast<Byte*>(&behind_) + behind, check_->size() - behind};
  }
  const size_t got = link_->try_recv(pieces, count);
  if (got == 0) return Moved::kNothing;
  const size_t of_message = std::min(got, left);
  if (check_ != nullptr) {
    if (moved_ == 0) check_->begin(n);
    for (size_t i = 0, done = 0; done < of_message; ++i) {
      const size_t run = std::min(of_message - done, pieces[i].iov_len);
      check_->add(pieces[i].iov_base, run);
      done += run;
    }
  }
  if (of_message > 0) target->advance(of_message);
  moved_ += got;
  if (moved_ < n + check_bytes()) return Moved::kSome;
  if (check_ != nullptr) verify(n, behind_);
  moved_ = behind_ = 0;
  return Moved::kAll;
}

Moved MessageReceiver::receive_windowed(size_t n, Cursor* target, bool around_cache) {
  const ConstSpan window = link_->recv_window(n);
  if (!window) return Moved::kNothing;
  for (size_t done = 0; done < n;) {
    const size_t run = std::min(n - done, target->contiguous());
    kernels::copy(target->out(), window.data + done, run, around_cache);
    target->advance(run);
    done += run;
  }
  link_->recv_release(n);
  return Moved::kAll;
}

}  // namespace perseus

// The only code above transports that tells links with windows from those with streams.
#include "transport/messages.h"

#include <cstring>

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

Moved MessageSender::send_streamed(size_t n, Cursor* source, bool from_in) {
  iovec pieces[kMostPieces + 1];
  int count = 0;
  // The header and the first bytes leave in one packet.
  if (header_left_ > 0) pieces[count++] = iovec{const_cast<Byte*>(header_), header_left_};
  if (n > 0)
    count += from_in ? source->gather_in(n - moved_, pieces + count, kMostPieces)
                     : source->gather_out(n - moved_, pieces + count, kMostPieces);
  if (count == 0) return Moved::kNothing;
  size_t sent = link_->try_send(pieces, count);
  if (sent == 0) return Moved::kNothing;
  const size_t of_header = std::min(sent, header_left_);
  header_ += of_header;
  header_left_ -= of_header;
  sent -= of_header;
  if (sent > 0) source->advance(sent);
  moved_ += sent;
  if (header_left_ > 0 || moved_ < n) return Moved::kSome;
  moved_ = 0;
  return Moved::kAll;
}

bool MessageReceiver::take_header(void* header, size_t bytes) {
  const ConstSpan window = link_->recv_window(bytes);
  if (!window) return false;
  std::memcpy(header, window.data, bytes);
  link_->recv_release(bytes);
  return true;
}

Moved MessageReceiver::receive(size_t n, Cursor* target, bool around_cache) {
  if (!windows_) {
    iovec pieces[kMostPieces];
    const size_t got = link_->try_recv(pieces, target->gather_out(n - moved_, pieces, kMostPieces));
    if (got == 0) return Moved::kNothing;
    target->advance(got);
    moved_ += got;
    if (moved_ < n) return Moved::kSome;
    moved_ = 0;
    return Moved::kAll;
  }
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

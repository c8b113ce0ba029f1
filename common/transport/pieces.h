// A run of bytes scattered over several tensors, and cursors that walk it: why fused buckets need no packing copy.
// Plain values; no threads.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/span.h"

namespace perseus {

// Part of a tensor: where it is read and where its result goes (which may be the same place).
struct Piece {
  const Byte* in = nullptr;
  Byte* out = nullptr;
  size_t bytes = 0;
};

inline size_t total_bytes(const std::vector<Piece>& pieces) {
  size_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes;
  return total;
}

inline size_t total_bytes(const iovec* pieces, int count) {
  size_t total = 0;
  for (int i = 0; i < count; ++i) total += pieces[i].iov_len;
  return total;
}

// A position in a list of pieces that outlives it.
class Cursor {
 public:
  Cursor() = default;
  Cursor(const std::vector<Piece>& pieces, size_t position) : piece_(pieces.data()), end_(piece_ + pieces.size()) {
    advance(position);
  }

  // What is left of the current piece; only while the run is not at its end.
  const Byte* in() const { return piece_->in + offset_; }
  Byte* out() const { return piece_->out + offset_; }
  size_t contiguous() const { return piece_->bytes - offset_; }

  void advance(size_t n) {
    offset_ += n;
    while (piece_ != end_ && offset_ >= piece_->bytes) {
      offset_ -= piece_->bytes;
      ++piece_;
    }
  }

  // Fills `vector` with the next n bytes of the in (or out) side; returns the number of entries, at most `most`.
  int gather_in(size_t n, iovec* vector, int most) const {
    return walk(n, vector, most, [](const Piece& p) { return const_cast<Byte*>(p.in); });
  }
  int gather_out(size_t n, iovec* vector, int most) const {
    return walk(n, vector, most, [](const Piece& p) { return p.out; });
  }

 private:
  template <typename Side>
  int walk(size_t n, iovec* vector, int most, Side side) const {
    int count = 0;
    size_t offset = offset_;
    for (const Piece* p = piece_; n > 0 && count < most && p != end_; ++p, offset = 0) {
      const size_t length = std::min(n, p->bytes - offset);
      if (length == 0) continue;
      vector[count++] = iovec{side(*p) + offset, length};
      n -= length;
    }
    return count;
  }

  const Piece* piece_ = nullptr;
  const Piece* end_ = nullptr;
  size_t offset_ = 0;
};

}  // namespace perseus

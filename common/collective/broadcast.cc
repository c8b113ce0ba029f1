// Broadcast: the root scatters parts, which their owners pass on to each other (van de Geijn 1994), or sends a small
// buffer whole.
#include "collective/exchange.h"

namespace perseus {

void Exchange::plan_broadcast() {
  const size_t ranks = peers_.size();
  const size_t bytes = total_bytes(plan_->pieces);
  const int root = plan_->root;
  const bool at_root = me_ == root;
  if (at_root)
    for (const Piece& piece : plan_->pieces)
      if (piece.out != piece.in && piece.bytes > 0) kernels::copy(piece.out, piece.in, piece.bytes, stream_out_);
  // Small: the root sends everything to everybody. Large: it scatters parts among the others, which pass them on. So
  // nobody sends more than the buffer, nor receives more: a part of the root's own would leave it once for each of
  // them.
  const bool whole = bytes <= kChunkBytes || ranks == 2;
  std::vector<size_t>& parts = even_;
  parts.assign(ranks, whole ? bytes : 0);
  for (size_t i = 0; i + 1 < ranks && !whole; ++i)
    parts[i < static_cast<size_t>(root) ? i : i + 1] = even_part(bytes, ranks - 1, i).bytes;
  reduces_ = !at_root;
  results_follow_ = !at_root && !whole;
  only_contributor_ = at_root ? -1 : root;
  own_bytes_ = at_root ? 0 : parts[me_];
  size_t begin = 0;
  for (size_t i = 0; i < ranks; ++i) {
    Peer& peer = peers_[i];
    const bool to_root = static_cast<int>(i) == root;
    if (static_cast<int>(i) == me_) {
      own_out_ = Cursor(plan_->pieces, begin);
    } else if (at_root) {
      peer.tx.c_total = parts[i];
      peer.c_src = Cursor(plan_->pieces, begin);
    } else if (to_root) {
      peer.rx.c_total = parts[me_];
    }
    if (!whole && static_cast<int>(i) != me_) {
      peer.tx.r_total = to_root ? 0 : parts[me_];
      peer.rx.r_total = at_root ? 0 : parts[i];
      peer.r_dst = Cursor(plan_->pieces, begin);
    }
    if (!whole) begin += parts[i];
  }
  size_t own_begin = 0;
  for (int i = 0; i < me_ && !whole; ++i) own_begin += parts[i];
  for (Peer& peer : peers_) peer.r_src = Cursor(plan_->pieces, own_begin);
}

}  // namespace perseus

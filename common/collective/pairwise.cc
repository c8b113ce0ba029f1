// The pairwise allreduce and reduce-scatter: every member gets everybody's contribution to its part (a reduce-scatter
// in one step) and returns the result to all (an allgather in one step). A small buffer is one part that everybody
// owns.
#include "collective/exchange.h"
#include "topology/allreduce_cost.h"

namespace perseus {

void Exchange::plan_reduction(bool gather) {
  const size_t ranks = peers_.size();
  const size_t bytes = total_bytes(plan_->pieces);
  reduces_ = true;
  // The bits are the same, because both ways reduce in rank order.
  if (gather && everyone_reduces(bytes, static_cast<int>(ranks))) {
    everyone_owns_all_ = true;
    own_bytes_ = bytes;
    own_in_ = own_out_ = Cursor(plan_->pieces, 0);
    for (Peer& peer : peers_) {
      peer.tx.c_total = peer.rx.c_total = bytes;
      peer.c_src = Cursor(plan_->pieces, 0);
    }
    return;
  }
  if (gather) even_parts(bytes, &even_);
  const std::vector<size_t>& parts = gather ? even_ : plan_->parts;
  results_follow_ = gather;
  size_t begin = 0, own_begin = 0;
  for (size_t i = 0; i < ranks; ++i) {
    if (static_cast<int>(i) == me_) own_begin = begin;
    Peer& peer = peers_[i];
    peer.tx.c_total = parts[i];
    peer.rx.c_total = parts[me_];
    peer.c_src = Cursor(plan_->pieces, begin);
    if (gather) {
      peer.tx.r_total = parts[me_];
      peer.rx.r_total = parts[i];
      peer.r_dst = Cursor(plan_->pieces, begin);
    }
    begin += parts[i];
  }
  own_bytes_ = parts[me_];
  own_in_ = Cursor(plan_->pieces, own_begin);
  own_out_ = gather ? own_in_ : Cursor(plan_->result, 0);
  for (Peer& peer : peers_) peer.r_src = own_in_;
}

}  // namespace perseus

// Allgather and alltoall, whose sizes come with the headers, and the allgather of parts whose sizes all know.
#include "collective/exchange.h"

namespace perseus {

void Exchange::plan_gather() {
  results_from_input_ = true;
  const bool all_to_all = plan_->collective == Collective::kAlltoall;
  size_t begin = 0;
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer.tx.r_total = all_to_all ? plan_->send_bytes[i] : total_bytes(plan_->pieces);
    peer.r_src = Cursor(plan_->pieces, begin);
    if (all_to_all) begin += plan_->send_bytes[i];
  }
}

void Exchange::plan_spread() {
  results_from_input_ = true;
  size_t begin = 0;
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    peer.tx.r_total = plan_->parts[static_cast<size_t>(me_)];
    peer.r_src = Cursor(plan_->pieces, 0);
    peer.rx.r_total = plan_->parts[i];
    peer.r_dst = Cursor(plan_->result, begin);
    begin += plan_->parts[i];
  }
}

void Exchange::place_outputs() {
  std::vector<size_t>& bytes = received_bytes_;
  std::vector<uint64_t>& rows = received_rows_;
  bytes.resize(peers_.size());
  rows.resize(peers_.size());
  const bool all_to_all = plan_->collective == Collective::kAlltoall;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const bool own = static_cast<int>(i) == me_;
    bytes[i] = own ? peers_[i].tx.r_total : peers_[i].in.result_bytes;
    rows[i] = own ? plan_->send_rows[all_to_all ? i : 0] : peers_[i].in.rows;
  }
  Byte* memory = sink_->allocate(bytes, rows);
  gathered_.clear();
  for (size_t i = 0; i < peers_.size(); ++i) {
    gathered_.push_back(Piece{nullptr, memory, bytes[i]});
    memory += bytes[i];
  }
  size_t begin = 0, own_begin = 0;
  for (int i = 0; i < me_ && all_to_all; ++i) own_begin += plan_->send_bytes[i];
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (static_cast<int>(i) == me_) {
      Cursor source(plan_->pieces, own_begin);
      for (size_t done = 0; done < bytes[i];) {
        const size_t run = std::min(bytes[i] - done, source.contiguous());
        Byte* out = gathered_[i].out + done;
        if (out != source.in()) kernels::copy(out, source.in(), run, stream_out_);  // else gathered in place
        source.advance(run);
        done += run;
      }
    } else {
      peer.rx.r_total = bytes[i];
      peer.r_dst = Cursor(gathered_, begin);
      settle(peer, &peer.rx);
    }
    begin += bytes[i];
  }
}

}  // namespace perseus

// The steps of an Exchange: headers, sends, receives, reductions. exchange_plan.cc decides what goes to which rank.
#include "collective/exchange.h"

#include <cstring>

#include "base/error.h"
#include "collective/stepped_exchange.h"

namespace perseus {
namespace {

constexpr int kMostPieces = 32;  // of one gathered send or receive
constexpr int kBurst = 4;        // chunks moved on one link before the others get their turn

// In the place of chunks that nobody will look at: the tensors they would come from may be gone.
constexpr Byte kNothing[kChunkBytes] = {};

}  // namespace

// ---- the schedule of one direction of a link ----

void Exchange::settle(const Peer& peer, Flow* flow) const {
  // Skip items that are empty; every item is at most a chunk.
  for (;;) {
    const bool c_left = flow->turn * kChunkBytes < flow->c_total;
    const bool r_now = flow->turn >= peer.lag;
    const bool r_left = flow->r_total > 0 && (!r_now || (flow->turn - peer.lag) * kChunkBytes < flow->r_total);
    if (!flow->result && c_left) return;
    flow->result = true;
    if (r_now && r_left) return;
    if (!r_left && (flow->turn + 1) * kChunkBytes >= flow->c_total) {
      flow->done = true;
      return;
    }
    flow->result = false;
    ++flow->turn;
  }
}

size_t Exchange::chunk_at(const Flow& flow, uint64_t lag) const {
  const size_t total = flow.result ? flow.r_total : flow.c_total;
  return std::min(kChunkBytes, total - chunk_index(flow, lag) * kChunkBytes);
}

void Exchange::next(const Peer& peer, Flow* flow) const {
  flow->moved = 0;
  if (flow->result) {
    flow->result = false;
    ++flow->turn;
  } else {
    flow->result = true;
  }
  settle(peer, flow);
}

// ---- one pass ----

bool Exchange::step() {
  if (in_steps_) {
    const bool stepped = stepped_->step();
    done_ = stepped_->done();
    return stepped;
  }
  bool moved = false;
  if (!headers_done_) moved |= check_headers();
  bool all_done = headers_done_;
  // Every rank begins with the one after it: else all would send to the same one first, which takes no more than one.
  for (size_t turn = 1; turn < peers_.size(); ++turn) {
    Peer& peer = peers_[(static_cast<size_t>(me_) + turn) % peers_.size()];
    for (int burst = 0; burst < kBurst && send_some(peer); ++burst) moved = true;
    if (peer.header_seen && (sink_ == nullptr || headers_done_))
      for (int burst = 0; burst < kBurst && receive_some(peer); ++burst) moved = true;
    all_done = all_done && peer.tx.done && peer.tx.header_left == 0 && peer.rx.done;
  }
  if (reduces_) {
    moved |= reduce_some();
    all_done = all_done && reduced_ * kChunkBytes >= own_bytes_;
  }
  if (rolled_back_) all_done = eager_parts_gone();
  if (all_done && !done_) {
    // A reduction may just have completed the last sends, which were counted above only if they were done before it.
    for (const Peer& peer : peers_)
      if (peer.link != nullptr && !rolled_back_ && !(peer.tx.done && peer.rx.done)) return true;
    done_ = true;
    moved = true;
  }
  return moved;
}

bool Exchange::send_some(Peer& peer) {
  Flow& tx = peer.tx;
  if (tx.done && tx.header_left == 0) return false;
  if (peer.windows && tx.header_left > 0) {
    const Span window = peer.link->send_window(sizeof(ExchangeHeader));
    if (!window) return false;
    std::memcpy(window.data, &peer.out, sizeof(ExchangeHeader));
    peer.link->send_commit(sizeof(ExchangeHeader));
    tx.header_left = 0;
    return true;
  }
  const bool may_send = rolled_back_ || (scheduled_ && !headers_done_) ? eager(peer, tx) : !tx.done;
  const bool ready = may_send && (!tx.result || !results_follow_ || chunk_index(tx, peer.lag) < reduced_);
  const size_t n = ready ? chunk_at(tx, peer.lag) : 0;
  if (n == 0 && tx.header_left == 0) return false;
  return peer.windows ? send_windowed(peer, n) : send_streamed(peer, n);
}

bool Exchange::send_windowed(Peer& peer, size_t n) {
  const Span window = peer.link->send_window(n);
  if (!window) return false;
  Flow& tx = peer.tx;
  Cursor& source = tx.result ? peer.r_src : peer.c_src;
  const bool from_input = !tx.result || results_from_input_;
  for (size_t done = 0; done < n;) {
    const size_t run = std::min(n - done, source.contiguous());
    kernels::copy(window.data + done, from_input ? source.in() : source.out(), run, false);
    source.advance(run);
    done += run;
  }
  peer.link->send_commit(n);
  next(peer, &tx);
  return true;
}

bool Exchange::send_streamed(Peer& peer, size_t n) {
  iovec pieces[kMostPieces + 1];
  int count = 0;
  Flow& tx = peer.tx;
  const size_t header_left = tx.header_left;
  if (header_left > 0) {
    // Header and first bytes leave in one packet.
    Byte* rest = reinterpret_cast<Byte*>(&peer.out) + sizeof(ExchangeHeader) - header_left;
    pieces[count++] = iovec{rest, header_left};
  }
  Cursor& source = tx.result ? peer.r_src : peer.c_src;
  if (n > 0) {
    const bool from_input = !tx.result || results_from_input_;
    count += from_input ? source.gather_in(n - tx.moved, pieces + count, kMostPieces)
                        : source.gather_out(n - tx.moved, pieces + count, kMostPieces);
  }
  size_t sent = peer.link->try_send(pieces, count);
  if (sent == 0) return false;
  const size_t of_header = std::min(sent, header_left);
  tx.header_left -= of_header;
  sent -= of_header;
  if (sent > 0) {
    source.advance(sent);
    tx.moved += sent;
    if (tx.moved == n) next(peer, &tx);
  }
  return true;
}

bool Exchange::receive_some(Peer& peer) {
  Flow& rx = peer.rx;
  if (rx.done || peer.contribution) return false;
  if (rolled_back_) return discard(peer);
  const size_t n = chunk_at(rx, peer.lag);
  if (!rx.result) {
    peer.contribution = peer.link->recv_window(n);  // released by the reduction
    return static_cast<bool>(peer.contribution);
  }
  if (!peer.windows) {
    iovec pieces[kMostPieces];
    const int count = peer.r_dst.gather_out(n - rx.moved, pieces, kMostPieces);
    const size_t got = peer.link->try_recv(pieces, count);
    if (got == 0) return false;
    peer.r_dst.advance(got);
    rx.moved += got;
    if (rx.moved == n) next(peer, &rx);
    return true;
  }
  const ConstSpan window = peer.link->recv_window(n);
  if (!window) return false;
  for (size_t done = 0; done < n;) {
    const size_t run = std::min(n - done, peer.r_dst.contiguous());
    kernels::copy(peer.r_dst.out(), window.data + done, run, stream_out_);
    peer.r_dst.advance(run);
    done += run;
  }
  peer.link->recv_release(n);
  next(peer, &rx);
  return true;
}

// ---- rolling back ----

void Exchange::roll_back(const std::vector<bool>& began) {
  rolled_back_ = true;
  reduces_ = false;
  uint64_t lag = 0;
  for (const Peer& peer : peers_) lag = std::max(lag, peer.lag);
  nothing_.assign(lag + 1, Piece{kNothing, nullptr, kChunkBytes});
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (peer.link == nullptr) continue;
    peer.c_src = Cursor(nothing_, 0);
    if (!began[static_cast<size_t>(me_)]) {
      peer.tx.header_left = 0;
      peer.tx.done = true;
    }
    if (!began[i]) {
      peer.header_seen = true;
      peer.rx.done = true;
    } else if (peer.contribution) {
      peer.link->recv_release(peer.contribution.size);
      peer.contribution = ConstSpan();
      next(peer, &peer.rx);
    }
  }
}

bool Exchange::discard(Peer& peer) {
  if (!eager(peer, peer.rx)) return false;
  const size_t n = chunk_at(peer.rx, peer.lag);
  if (!peer.link->recv_window(n)) return false;
  peer.link->recv_release(n);
  next(peer, &peer.rx);
  return true;
}

bool Exchange::eager_parts_gone() const {
  for (const Peer& peer : peers_) {
    if (peer.link == nullptr) continue;
    if (peer.tx.header_left > 0 || eager(peer, peer.tx)) return false;
    if (!peer.header_seen || eager(peer, peer.rx)) return false;
  }
  return true;
}

// ---- reducing ----

bool Exchange::reduce_some() {
  bool moved = false;
  for (int burst = 0; burst < kBurst && reduced_ * kChunkBytes < own_bytes_; ++burst) {
    const size_t n = std::min<size_t>(kChunkBytes, own_bytes_ - reduced_ * kChunkBytes);
    if (!reduce_ready(n)) break;
    reduce_chunk(n);
    moved = true;
  }
  return moved;
}

bool Exchange::reduce_ready(size_t n) {
  windows_.clear();
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (peer.link == nullptr) continue;
    if ((only_contributor_ < 0 || only_contributor_ == static_cast<int>(i)) && !peer.contribution) return false;
    // Every rank reduces into the place from which its own contribution is sent: the contribution must have left first.
    if (everyone_owns_all_ && !peer.tx.done) return false;
    if (!results_follow_ || !peer.windows || peer.tx.r_total == 0) continue;
    const bool at_result = !peer.tx.done && peer.tx.result && chunk_index(peer.tx, peer.lag) == reduced_;
    if (!at_result || peer.tx.header_left > 0) return false;
    const Span window = peer.link->send_window(n);
    if (!window) return false;
    windows_.push_back(window.data);
  }
  return true;
}

void Exchange::reduce_chunk(size_t n) {
  const size_t element = dtype_size(plan_->reduction.dtype);
  for (size_t done = 0; done < n;) {
    size_t run = std::min(n - done, own_out_.contiguous());
    Byte* second = windows_.empty() ? nullptr : windows_[0] + done;
    if (only_contributor_ >= 0) {
      const Byte* source = peers_[only_contributor_].contribution.data + done;
      kernels::copy(own_out_.out(), source, run, stream_out_);
      if (second != nullptr) kernels::copy(second, source, run, false);
    } else {
      run = std::min(run, own_in_.contiguous());
      for (size_t i = 0; i < peers_.size(); ++i)
        sources_[i] = peers_[i].link == nullptr ? own_in_.in() : peers_[i].contribution.data + done;
      kernels::reduce(plan_->reduction, own_out_.out(), second, sources_.data(), static_cast<int>(sources_.size()),
                      run / element, stream_out_);
      own_in_.advance(run);
    }
    own_out_.advance(run);
    for (size_t w = 1; w < windows_.size(); ++w) kernels::copy(windows_[w] + done, second, run, false);
    done += run;
  }
  for (Peer& peer : peers_) {
    if (peer.contribution) {
      peer.link->recv_release(n);
      peer.contribution = ConstSpan();
      next(peer, &peer.rx);
    }
    if (peer.link != nullptr && results_follow_ && peer.windows && peer.tx.r_total > 0) {
      peer.link->send_commit(n);
      next(peer, &peer.tx);
    }
  }
  ++reduced_;
}

std::vector<int> Exchange::waiting_for() const {
  if (in_steps_) return stepped_->waiting_for();
  std::vector<int> silent, unable;
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    if (peer.link == nullptr) continue;
    if (!peer.header_seen || (!peer.rx.done && !peer.contribution)) silent.push_back(static_cast<int>(i));
    if (!peer.tx.done) unable.push_back(static_cast<int>(i));
  }
  return silent.empty() ? unable : silent;
}

}  // namespace perseus

// The steps of an Exchange: headers, sends, receives, reductions. What goes to which rank is decided in
// pairwise.cc, broadcast.cc and allgather.cc.
#include "collective/exchange.h"

namespace perseus {
namespace {

constexpr int kBurst = 4;  // chunks moved on one link before the others get their turn

// In the place of chunks that nobody will look at: the tensors they would come from may be gone.
constexpr Byte kNothing[kChunkBytes] = {};
// Results larger than this will not be read again from the cache: write around it, but not into lines that have just
// been read (in place), where that is slower.
constexpr size_t kStreamBytes = 8 * 1024 * 1024;

}  // namespace

Exchange::Exchange(const std::vector<Link*>& links, int me)
    : peers_(links.size()), me_(me), even_(links.size()), sources_(links.size()) {
  for (size_t i = 0; i < links.size(); ++i) {
    peers_[i].link = static_cast<int>(i) == me ? nullptr : links[i];
    if (peers_[i].link == nullptr) continue;
    peers_[i].sender = MessageSender(links[i]);
    peers_[i].receiver = MessageReceiver(links[i]);
    peers_[i].lag = peers_[i].sender.depth(links.size() - 1);  // turns by which a result trails its contribution
  }
  windows_.reserve(links.size());
}

// ---- beginning ----

void Exchange::start(const ExchangePlan& plan, const ExchangeHeader& header, OutputSink* sink) {
  plan_ = &plan;
  sink_ = sink;
  scheduled_ = header.schedule != 0;
  restart();
  bool in_memory = true;
  for (const Peer& peer : peers_) in_memory &= peer.link == nullptr || peer.sender.composes_in_place();
  const bool in_place = !plan.pieces.empty() && plan.pieces[0].in == plan.pieces[0].out;
  stream_out_ = in_memory && !in_place && plan.bytes() >= kStreamBytes;
  choose_parts();
  send_headers(header);
}

void Exchange::restart() {
  done_ = headers_done_ = rolled_back_ = false;
  reduces_ = everyone_owns_all_ = results_follow_ = results_from_input_ = false;
  only_contributor_ = -1;
  reduced_ = 0;
  own_bytes_ = 0;
  for (Peer& peer : peers_) {
    peer.header_seen = false;
    peer.tx = Flow();
    peer.rx = Flow();
    peer.contribution = ConstSpan();
  }
}

void Exchange::choose_parts() {
  switch (plan_->collective) {
    case Collective::kAllreduce:
      return plan_reduction(true);
    case Collective::kReduceScatter:
      return plan_reduction(false);
    case Collective::kBroadcast:
      return plan_broadcast();
    case Collective::kAllgather:
    case Collective::kAlltoall:
      return plan_gather();
    case Collective::kSpread:
      return plan_spread();
  }
}

void Exchange::send_headers(const ExchangeHeader& header) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (peer.link == nullptr) continue;
    peer.out = header;
    peer.out.result_bytes = peer.tx.r_total;
    if (!plan_->send_rows.empty()) peer.out.rows = plan_->send_rows[plan_->collective == Collective::kAlltoall ? i : 0];
    peer.sender.start(&peer.out, sizeof peer.out);
    peer.receiver.start();
    settle(peer, &peer.tx);
    if (!plan_->sizes_vary()) settle(peer, &peer.rx);
  }
}

bool Exchange::check_headers() {
  bool moved = false, all = true;
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (peer.link == nullptr || peer.header_seen) continue;
    if (!peer.receiver.take_header(&peer.in, sizeof peer.in)) {
      all = false;
      continue;
    }
    check_header(peer.in, peer.out, static_cast<int>(i));
    if (sink_ == nullptr) check_results(peer.in, peer.rx.r_total, static_cast<int>(i));
    moved = true;
    peer.header_seen = true;
  }
  if (all) {
    headers_done_ = true;
    if (sink_ != nullptr) place_outputs();
    moved = true;
  }
  return moved;
}

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
  bool moved = false;
  if (!headers_done_) moved |= check_headers();
  bool all_done = headers_done_;
  // Every rank begins with the one after it: else all would send to the same one first, which takes no more than one.
  for (size_t turn = 1; turn < peers_.size(); ++turn) {
    Peer& peer = peers_[(static_cast<size_t>(me_) + turn) % peers_.size()];
    for (int burst = 0; burst < kBurst && send_some(peer); ++burst) moved = true;
    if (peer.header_seen && (sink_ == nullptr || headers_done_))
      for (int burst = 0; burst < kBurst && receive_some(peer); ++burst) moved = true;
    all_done = all_done && peer.tx.done && peer.sender.header_gone() && peer.rx.done;
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
  if (tx.done && peer.sender.header_gone()) return false;
  const bool may_send = rolled_back_ || (scheduled_ && !headers_done_) ? eager(peer, tx) : !tx.done;
  const bool ready = may_send && (!tx.result || !results_follow_ || chunk_index(tx, peer.lag) < reduced_);
  const size_t n = ready ? chunk_at(tx, peer.lag) : 0;
  const Moved moved = peer.sender.send(n, tx.result ? &peer.r_src : &peer.c_src, !tx.result || results_from_input_);
  if (n > 0 && moved == Moved::kAll) next(peer, &tx);
  return moved != Moved::kNothing;
}

bool Exchange::receive_some(Peer& peer) {
  Flow& rx = peer.rx;
  if (rx.done || peer.contribution) return false;
  if (rolled_back_) return discard(peer);
  const size_t n = chunk_at(rx, peer.lag);
  if (!rx.result) {
    // Released by the reduction, which verifies it: should the batch be dropped, the sender may have dropped it before.
    peer.contribution = peer.receiver.unverified(n);
    return static_cast<bool>(peer.contribution);
  }
  const Moved moved = peer.receiver.receive(n, &peer.r_dst, stream_out_);
  if (moved == Moved::kAll) next(peer, &rx);
  return moved != Moved::kNothing;
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
      peer.sender.drop_header();
      peer.tx.done = true;
    }
    if (!began[i]) {
      peer.header_seen = true;
      peer.rx.done = true;
    } else if (peer.contribution) {
      peer.receiver.release(peer.contribution.size);
      peer.contribution = ConstSpan();
      next(peer, &peer.rx);
    }
  }
}

bool Exchange::discard(Peer& peer) {
  if (!eager(peer, peer.rx)) return false;
  const size_t n = chunk_at(peer.rx, peer.lag);
  if (!peer.receiver.skip(n)) return false;
  next(peer, &peer.rx);
  return true;
}

bool Exchange::eager_parts_gone() const {
  for (const Peer& peer : peers_) {
    if (peer.link == nullptr) continue;
    if (!peer.sender.header_gone() || eager(peer, peer.tx)) return false;
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
    if (peer.contribution) peer.receiver.whole(peer.contribution.size);
    // Every rank reduces into the place from which its own contribution is sent: the contribution must have left first.
    if (everyone_owns_all_ && !peer.tx.done) return false;
    if (!results_follow_ || !peer.sender.composes_in_place() || peer.tx.r_total == 0) continue;
    const bool at_result = !peer.tx.done && peer.tx.result && chunk_index(peer.tx, peer.lag) == reduced_;
    if (!at_result || !peer.sender.header_gone()) return false;
    const Span window = peer.sender.room(n);
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
      peer.receiver.release(n);
      peer.contribution = ConstSpan();
      next(peer, &peer.rx);
    }
    if (peer.link != nullptr && results_follow_ && peer.sender.composes_in_place() && peer.tx.r_total > 0) {
      peer.sender.commit(n);
      next(peer, &peer.tx);
    }
  }
  ++reduced_;
}

std::vector<int> Exchange::waiting_for() const {
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

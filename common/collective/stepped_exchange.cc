// One step at a time: its send and its receive go on beside each other, message by message.
#include "collective/stepped_exchange.h"

#include <cstring>

namespace perseus {
namespace {

constexpr int kMostPieces = 32;  // of one gathered send or receive
constexpr int kBurst = 8;        // messages moved before others get their turn

size_t next_message(const ByteRange& range, size_t done) { return std::min(kChunkBytes, range.bytes - done); }

}  // namespace

SteppedExchange::SteppedExchange(std::vector<Link*> links, int me)
    : peers_(links.size()), me_(me), parts_(links.size()) {
  for (size_t i = 0; i < links.size(); ++i) {
    if (static_cast<int>(i) == me) continue;
    peers_[i].link = links[i];
    peers_[i].windows = links[i]->has_windows();
  }
}

void SteppedExchange::start(const ExchangePlan& plan, const ExchangeHeader& header) {
  make_steps(plan);
  partial_ = last_ = plan.reduction;
  partial_.prescale = last_.prescale = partial_.postscale = 1.0;
  partial_.divisor = 1;
  if (plan.reduction.prescale != 1.0) {
    // What comes from others is scaled: so must our own be, and what leaves.
    kernels::ReduceSpec scale;
    scale.dtype = plan.reduction.dtype;
    scale.prescale = plan.reduction.prescale;
    for (Piece& piece : run_) {
      const void* source = piece.in;
      kernels::reduce(scale, piece.out, nullptr, &source, 1, piece.bytes / dtype_size(scale.dtype), false);
      piece.in = piece.out;
    }
  }
  for (Peer& peer : peers_) {
    peer.out = header;
    peer.header_left = sizeof(ExchangeHeader);
    peer.header_seen = false;
  }
  at_ = 0;
  begin_step();
}

void SteppedExchange::make_steps(const ExchangePlan& plan) {
  const int members = static_cast<int>(peers_.size());
  if (plan.algorithm == Algorithm::kRing) {
    order_for_ring(plan.pieces, &parts_, &run_);
    ring_steps(parts_, me_, &steps_);
    return;
  }
  run_.assign(plan.pieces.begin(), plan.pieces.end());
  if (plan.algorithm == Algorithm::kHalvingDoubling) halving_doubling_steps(total_bytes(run_), members, me_, &steps_);
  else recursive_doubling_steps(total_bytes(run_), members, me_, &steps_);
}

void SteppedExchange::begin_step() {
  sent_ = received_ = 0;
  if (done()) return;
  const Step& step = steps_[at_];
  source_ = Cursor(run_, step.send.begin);
  target_ = Cursor(run_, step.receive.begin);
}

bool SteppedExchange::step() {
  bool moved = false;
  for (int burst = 0; burst < kBurst && !done(); ++burst) {
    const bool sent = send_some(), received = receive_some();
    if (!sent && !received) break;
    moved = true;
    const Step& step = steps_[at_];
    const bool all_sent = step.to < 0 || sent_ == step.send.bytes;
    const bool all_received = step.from < 0 || received_ == step.receive.bytes;
    if (!all_sent || !all_received) continue;
    ++at_;
    begin_step();
  }
  return moved;
}

bool SteppedExchange::send_some() {
  const Step& step = steps_[at_];
  if (step.to < 0 || sent_ == step.send.bytes) return false;
  Peer& to = peer(step.to);
  // A message is sent whole: where it began is known by what is sent of the range.
  const size_t n = kChunkBytes - sent_ % kChunkBytes;
  const size_t left = std::min(n, step.send.bytes - sent_);
  return to.windows ? send_window(to, left) : send_stream(to, left);
}

bool SteppedExchange::send_window(Peer& to, size_t n) {
  if (to.header_left > 0) {
    const Span window = to.link->send_window(sizeof(ExchangeHeader));
    if (!window) return false;
    std::memcpy(window.data, &to.out, sizeof(ExchangeHeader));
    to.link->send_commit(sizeof(ExchangeHeader));
    to.header_left = 0;
  }
  const Span window = to.link->send_window(n);
  if (!window) return false;
  for (size_t done = 0; done < n;) {
    const size_t length = std::min(n - done, source_.contiguous());
    kernels::copy(window.data + done, steps_[at_].send_input ? source_.in() : source_.out(), length, false);
    source_.advance(length);
    done += length;
  }
  to.link->send_commit(n);
  sent_ += n;
  return true;
}

bool SteppedExchange::send_stream(Peer& to, size_t n) {
  iovec pieces[kMostPieces + 1];
  int count = 0;
  const size_t header_left = to.header_left;
  if (header_left > 0) {
    // Header and first bytes leave in one packet.
    Byte* rest = reinterpret_cast<Byte*>(&to.out) + sizeof(ExchangeHeader) - header_left;
    pieces[count++] = iovec{rest, header_left};
  }
  count += steps_[at_].send_input ? source_.gather_in(n, pieces + count, kMostPieces)
                                  : source_.gather_out(n, pieces + count, kMostPieces);
  const size_t sent = to.link->try_send(pieces, count);
  if (sent == 0) return false;
  const size_t of_header = std::min(sent, header_left);
  to.header_left -= of_header;
  source_.advance(sent - of_header);
  sent_ += sent - of_header;
  return true;
}

bool SteppedExchange::receive_some() {
  const Step& step = steps_[at_];
  if (step.from < 0 || received_ == step.receive.bytes) return false;
  Peer& from = peer(step.from);
  if (!from.header_seen) return receive_header(from);
  const size_t n = next_message(step.receive, received_);
  return step.reduce ? reduce_next(from, n) : place_next(from, n);
}

bool SteppedExchange::receive_header(Peer& from) {
  const ConstSpan window = from.link->recv_window(sizeof(ExchangeHeader));
  if (!window) return false;
  ExchangeHeader in;
  std::memcpy(&in, window.data, sizeof in);
  from.link->recv_release(sizeof(ExchangeHeader));
  check_header(in, from.out, steps_[at_].from);
  from.header_seen = true;
  return true;
}

bool SteppedExchange::reduce_next(Peer& from, size_t n) {
  const ConstSpan window = from.link->recv_window(n);
  if (!window) return false;
  const Step& step = steps_[at_];
  // Recursive doubling reduces into the buffer that it sends. The other end waits for
  // the same message and nothing else.
  const bool sends_it = step.to >= 0 && step.send.begin == step.receive.begin;
  if (sends_it && sent_ < received_ + n) return false;
  const kernels::ReduceSpec& spec = step.last ? last_ : partial_;
  for (size_t done = 0; done < n;) {
    const size_t length = std::min(n - done, target_.contiguous());
    const void* own = step.own_input ? target_.in() : target_.out();
    const void* sources[] = {window.data + done, own};
    if (step.own_first) std::swap(sources[0], sources[1]);
    kernels::reduce(spec, target_.out(), nullptr, sources, 2, length / dtype_size(spec.dtype), false);
    target_.advance(length);
    done += length;
  }
  from.link->recv_release(n);
  received_ += n;
  return true;
}

bool SteppedExchange::place_next(Peer& from, size_t n) {
  if (!from.windows) {
    iovec pieces[kMostPieces];
    const size_t got = from.link->try_recv(pieces, target_.gather_out(n, pieces, kMostPieces));
    target_.advance(got);
    received_ += got;
    return got > 0;
  }
  const ConstSpan window = from.link->recv_window(n);
  if (!window) return false;
  for (size_t done = 0; done < n;) {
    const size_t length = std::min(n - done, target_.contiguous());
    kernels::copy(target_.out(), window.data + done, length, false);
    target_.advance(length);
    done += length;
  }
  from.link->recv_release(n);
  received_ += n;
  return true;
}

std::vector<int> SteppedExchange::waiting_for() const {
  if (done()) return {};
  const Step& step = steps_[at_];
  if (step.from >= 0 && received_ < step.receive.bytes) return {step.from};
  return {step.to};
}

}  // namespace perseus

// One step at a time: its send and its receive go on beside each other, message by message.
#include "collective/stepped_exchange.h"

namespace perseus {
namespace {

constexpr int kBurstMessages = 8;  // messages moved before others get their turn

size_t next_message(const ByteRange& range, size_t done) { return std::min(kChunkBytes, range.bytes - done); }

}  // namespace

SteppedExchange::SteppedExchange(const std::vector<Link*>& links, int me)
    : peers_(links.size()), me_(me), parts_(links.size()) {
  for (size_t i = 0; i < links.size(); ++i) {
    if (static_cast<int>(i) == me) continue;
    peers_[i].link = links[i];
    peers_[i].sender = MessageSender(links[i]);
    peers_[i].receiver = MessageReceiver(links[i]);
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
    peer.sender.start(&peer.out, sizeof peer.out);
    peer.receiver.start();
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
  for (int burst = 0; burst < kBurstMessages && !done(); ++burst) {
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
  const size_t n = next_message(step.send, sent_);
  const Moved moved = to.sender.send(n, &source_, step.send_input);
  if (moved == Moved::kAll) sent_ += n;
  return moved != Moved::kNothing;
}

bool SteppedExchange::receive_some() {
  const Step& step = steps_[at_];
  if (step.from < 0 || received_ == step.receive.bytes) return false;
  Peer& from = peer(step.from);
  if (!from.header_seen) {
    ExchangeHeader in;
    if (!from.receiver.take_header(&in, sizeof in)) return false;
    check_header(in, from.out, step.from);
    from.header_seen = true;
    return true;
  }
  const size_t n = next_message(step.receive, received_);
  return step.reduce ? reduce_next(from, n) : place_next(from, n);
}

bool SteppedExchange::reduce_next(Peer& from, size_t n) {
  const ConstSpan window = from.receiver.whole(n);
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
  from.receiver.release(n);
  received_ += n;
  return true;
}

bool SteppedExchange::place_next(Peer& from, size_t n) {
  const Moved moved = from.receiver.receive(n, &target_, false);
  if (moved == Moved::kAll) received_ += n;
  return moved != Moved::kNothing;
}

std::vector<int> SteppedExchange::waiting_for() const {
  if (done()) return {};
  const Step& step = steps_[at_];
  if (step.from >= 0 && received_ < step.receive.bytes) return {step.from};
  return {step.to};
}

}  // namespace perseus

// What an Exchange sends to whom: the collectives as parts, contributions and results.
#include "base/error.h"
#include "collective/exchange.h"
#include "collective/stepped_exchange.h"
#include "topology/allreduce_cost.h"

namespace perseus {
namespace {

constexpr uint32_t kMagic = 0x50584348;  // "PXCH"
// Results larger than this will not be read again from the cache: write around it, but not into lines that have just
// been read (in place), where that is slower.
constexpr size_t kStreamBytes = 8 * 1024 * 1024;

}  // namespace

Exchange::Exchange(std::vector<Link*> links, int me, uint32_t epoch, Channel channel)
    : peers_(links.size()), me_(me), epoch_(epoch), channel_(channel), even_(links.size()), sources_(links.size()) {
  for (size_t i = 0; i < links.size(); ++i) {
    peers_[i].link = static_cast<int>(i) == me ? nullptr : links[i];
    if (peers_[i].link == nullptr) continue;
    peers_[i].sender = MessageSender(links[i]);
    peers_[i].receiver = MessageReceiver(links[i]);
    peers_[i].lag = peers_[i].sender.depth(links.size() - 1);  // turns by which a result trails its contribution
  }
  windows_.reserve(links.size());
}

Exchange::~Exchange() = default;

ExchangeHeader Exchange::header_of(uint64_t sequence, size_t bytes) const {
  ExchangeHeader header;
  header.magic = kMagic;
  header.epoch = epoch_;
  header.group = channel_.group;
  header.stream = channel_.stream;
  header.sequence = sequence;
  header.collective = static_cast<uint8_t>(plan_->collective);
  header.algorithm = static_cast<uint8_t>(plan_->algorithm);
  header.dtype = static_cast<uint8_t>(plan_->reduction.dtype);
  header.op = static_cast<uint8_t>(plan_->reduction.op);
  header.bytes = bytes;
  return header;
}

void Exchange::start(const ExchangePlan& plan, uint64_t sequence, OutputSink* sink, uint64_t schedule) {
  plan_ = &plan;
  sink_ = sink;
  done_ = false;
  headers_done_ = rolled_back_ = false;
  scheduled_ = schedule != 0;
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
  const size_t bytes = total_bytes(plan.collective == Collective::kSpread ? plan.result : plan.pieces);
  in_steps_ = plan.algorithm != Algorithm::kPairwise && peers_.size() > 1;
  if (in_steps_) {
    if (!stepped_) {
      std::vector<Link*> links;
      for (const Peer& peer : peers_) links.push_back(peer.link);
      stepped_ = std::make_unique<SteppedExchange>(std::move(links), me_);
    }
    stepped_->start(plan, header_of(sequence, bytes));
    return;
  }
  bool in_memory = true;
  for (const Peer& peer : peers_) in_memory &= peer.link == nullptr || peer.sender.composes_in_place();
  const bool in_place = !plan.pieces.empty() && plan.pieces[0].in == plan.pieces[0].out;
  stream_out_ = bytes >= kStreamBytes && in_memory && !in_place;

  switch (plan.collective) {
    case Collective::kAllreduce:
      plan_reduction(true);
      break;
    case Collective::kReduceScatter:
      plan_reduction(false);
      break;
    case Collective::kBroadcast:
      plan_broadcast();
      break;
    case Collective::kAllgather:
    case Collective::kAlltoall:
      plan_gather();
      break;
    case Collective::kSpread:
      plan_spread();
      break;
  }
  const bool sizes_differ = plan.collective == Collective::kAllgather || plan.collective == Collective::kAlltoall;
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (peer.link == nullptr) continue;
    ExchangeHeader& header = peer.out;
    header = header_of(sequence, sizes_differ ? 0 : bytes);
    header.schedule = schedule;
    header.result_bytes = peer.tx.r_total;
    if (!plan.send_rows.empty()) header.rows = plan.send_rows[plan.collective == Collective::kAlltoall ? i : 0];
    peer.sender.start(&header, sizeof header);
    peer.receiver.start();
    settle(peer, &peer.tx);
    if (!sizes_differ) settle(peer, &peer.rx);
  }
}

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

void Exchange::plan_broadcast() {
  const size_t ranks = peers_.size();
  const size_t bytes = total_bytes(plan_->pieces);
  const int root = plan_->root;
  const bool at_root = me_ == root;
  if (at_root)
    for (const Piece& piece : plan_->pieces)
      if (piece.out != piece.in && piece.bytes > 0) kernels::copy(piece.out, piece.in, piece.bytes, stream_out_);
  // Small: the root sends everything to everybody. Large: it scatters parts, which their owners pass on (the root's own
  // part goes out directly), so no link carries more than the buffer.
  const bool whole = bytes <= kChunkBytes || ranks == 2;
  if (whole) even_.assign(ranks, bytes);
  else even_parts(bytes, &even_);
  const std::vector<size_t>& parts = even_;
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
    if (sink_ == nullptr && peer.in.result_bytes != peer.rx.r_total)
      fail(ErrorKind::kInternal, "[collective] member " + std::to_string(i) + " of the group has results of " +
                                     std::to_string(peer.in.result_bytes) + " bytes, expected " +
                                     std::to_string(peer.rx.r_total));
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

void check_header(const ExchangeHeader& in, const ExchangeHeader& out, int from) {
  const bool same = in.magic == out.magic && in.epoch == out.epoch && in.group == out.group &&
                    in.stream == out.stream && in.sequence == out.sequence && in.collective == out.collective &&
                    in.algorithm == out.algorithm && in.dtype == out.dtype && in.op == out.op &&
                    in.bytes == out.bytes && in.schedule == out.schedule;
  if (same) return;
  const auto describe = [](const ExchangeHeader& h) {
    return "group " + std::to_string(h.group) + " stream " + std::to_string(h.stream) + " operation " +
           std::to_string(h.sequence) + " collective " + std::to_string(h.collective) + " algorithm " +
           std::to_string(h.algorithm) + " of " + std::to_string(h.bytes) + " bytes" +
           (h.schedule == 0 ? "" : " of schedule " + std::to_string(h.schedule));
  };
  fail(ErrorKind::kInternal, "[collective] member " + std::to_string(from) + " of the group sent the header of " +
                                 describe(in) + ", expected " + describe(out));
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
        kernels::copy(gathered_[i].out + done, source.in(), run, stream_out_);
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

// How an Exchange begins: its header, and the check that all members do the same thing.
#include "base/error.h"
#include "collective/exchange.h"
#include "collective/stepped_exchange.h"

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

}  // namespace perseus

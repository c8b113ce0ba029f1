// The pairwise exchange behind every collective: each rank sends every other its contribution to that rank's part
// (reduce-scatter), reduces the parts in rank order, and sends the result on (allgather), chunk by chunk, so that
// a chunk is reduced and returned while the next is on its way. Resumable: step() never blocks. Used by one
// progress engine.
//
// Stream order per link, the same on both ends (c = contribution, r = result, L = lag):
//   header, c0 … cL, r0, c(L+1), r1, …
// A reduction of chunk k waits until every peer's ck is here and every windowed link has sent c(k+L), so its result
// goes straight into the peers' windows. Let m be the lowest reduction not done on any rank: its c's only wait for ring
// space that its owner has freed, and its r's for peers that have consumed all c below m, so at most 2L + 2 messages
// lie in a ring, which has room for that many: the exchange cannot deadlock.
//
// An exchange of a schedule begins before this rank knows whether all others will take part. Until it has every peer's
// header it sends its eager part only (header, c0 … cL, which fits in a ring and follows from sizes), and nothing is
// written over: a reduction needs a contribution, and so the word, of every rank, a result comes from a rank that has
// reduced. So it can be rolled back on all ranks as long as one of them has not begun it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/steps.h"
#include "kernels/kernels.h"
#include "transport/messages.h"

namespace perseus {

// kSpread: an allgather of parts whose sizes all know, into tensors; the own part lies there already.
enum class Collective : uint8_t { kAllreduce, kReduceScatter, kAllgather, kBroadcast, kAlltoall, kSpread };

// First on every link of every exchange: both ends check that they are doing the same thing.
struct ExchangeHeader {
  uint32_t magic = 0;
  uint32_t epoch = 0;
  uint32_t group = 0;
  uint32_t stream = 0;
  uint64_t sequence = 0;
  uint8_t collective = 0, dtype = 0, op = 0, algorithm = 0;
  uint32_t unused2 = 0;
  uint64_t bytes = 0;         // of the whole buffer (allreduce, reduce-scatter, broadcast), 0 where it differs per rank
  uint64_t result_bytes = 0;  // that the sender is going to send as results on this link
  uint64_t rows = 0;          // allgather, alltoall: of result_bytes
  uint64_t schedule = 0;      // fingerprint of the schedule that the exchange belongs to, 0 = negotiated online
};
static_assert(sizeof(ExchangeHeader) == 64, "one cache line");
// Throws Error(kInternal) where member `from` of the group does something else than we, sizes of results aside.
void check_header(const ExchangeHeader& in, const ExchangeHeader& out, int from);

// What one execution does. Everything but the per-rank vectors must agree on all ranks.
struct ExchangePlan {
  Collective collective = Collective::kAllreduce;
  Algorithm algorithm = Algorithm::kPairwise;  // allreduce; the others are pairwise
  kernels::ReduceSpec reduction;               // allreduce, reduce-scatter
  std::vector<Piece> pieces;        // allreduce, broadcast: in/out. Reduce-scatter: in (out unused). Else: in only
  std::vector<size_t> parts;        // reduce-scatter, spread: bytes of every rank's part of the whole, in rank order
  std::vector<Piece> result;        // reduce-scatter: out of our part; spread: out of the whole
  int root = 0;                     // broadcast: index in the group
  std::vector<size_t> send_bytes;   // alltoall: for every rank, consecutive in the pieces
  std::vector<uint64_t> send_rows;  // alltoall: the same in rows; allgather: [0] = rows of this rank

  void clear() {
    algorithm = Algorithm::kPairwise;
    pieces.clear();
    parts.clear();
    result.clear();
    send_bytes.clear();
    send_rows.clear();
  }
};

// Makes room for an allgather's or alltoall's output once all sizes are known.
class OutputSink {
 public:
  virtual ~OutputSink() = default;
  // bytes[i], rows[i] come from group rank i. Returns memory for all of it, in rank order.
  virtual Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) = 0;
};

class SteppedExchange;

class Exchange {
 public:
  // `links[i]` reaches group rank i; links[me] is null. Links outlive the exchange object.
  Exchange(std::vector<Link*> links, int me, uint32_t epoch, Channel channel);
  ~Exchange();

  // Begins; `plan` and `sink` (allgather, alltoall) must stay valid until done(). Only when done. `schedule`: see
  // ExchangeHeader.
  void start(const ExchangePlan& plan, uint64_t sequence, OutputSink* sink, uint64_t schedule = 0);
  // Some rank has not begun this exchange of a schedule, and none will finish it: from here on tensors are not touched,
  // and it is done once the eager parts have gone from links. `began[i]`: has member i begun it? On all ranks alike.
  void roll_back(const std::vector<bool>& began);
  // Have all members begun?
  bool agreed() const { return headers_done_; }
  // Moves what can be moved; true when anything did. Throws Error on a broken link or a peer that does something else.
  bool step();
  bool done() const { return done_; }
  // Group ranks whose bytes we wait for, or that do not take ours: for messages.
  std::vector<int> waiting_for() const;

 private:
  // Where one direction of one link stands.
  struct Flow {
    uint64_t turn = 0;    // of the schedule: c(turn), then r(turn - lag)
    bool result = false;  // within the turn
    size_t c_total = 0, r_total = 0;
    bool done = false;
  };
  struct Peer {
    Link* link = nullptr;
    MessageSender sender;
    MessageReceiver receiver;
    uint64_t lag = 0;
    ExchangeHeader out, in;
    bool header_seen = false;
    Flow tx, rx;
    Cursor c_src, r_src, r_dst;
    ConstSpan contribution;  // rx stands at a contribution that is wholly here
  };

  ExchangeHeader header_of(uint64_t sequence, size_t bytes) const;
  void plan_reduction(bool gather);
  void plan_broadcast();
  void plan_gather();
  void plan_spread();
  void set_flows();
  bool check_headers();
  void place_outputs();

  void settle(const Peer& peer, Flow* flow) const;
  size_t chunk_at(const Flow& flow, uint64_t lag) const;
  uint64_t chunk_index(const Flow& flow, uint64_t lag) const { return flow.result ? flow.turn - lag : flow.turn; }
  void next(const Peer& peer, Flow* flow) const;

  bool eager(const Peer& peer, const Flow& flow) const { return !flow.done && !flow.result && flow.turn <= peer.lag; }
  bool discard(Peer& peer);
  bool eager_parts_gone() const;
  bool send_some(Peer& peer);
  bool receive_some(Peer& peer);
  bool reduce_some();
  bool reduce_ready(size_t n);
  void reduce_chunk(size_t n);

  std::vector<Peer> peers_;  // of every group rank; the own entry is unused
  int me_;
  uint32_t epoch_;
  Channel channel_;
  bool done_ = true;

  std::unique_ptr<SteppedExchange> stepped_;  // for other algorithms than pairwise; made when first needed
  bool in_steps_ = false;                     // it is what is under way

  const ExchangePlan* plan_ = nullptr;
  OutputSink* sink_ = nullptr;
  bool headers_done_ = false;
  bool scheduled_ = false;
  bool rolled_back_ = false;
  bool reduces_ = false;             // this rank reduces contributions
  bool everyone_owns_all_ = false;   // small: every rank reduces the whole buffer itself
  bool results_follow_ = false;      // a reduced chunk is sent on
  bool results_from_input_ = false;  // what is sent as results is our input
  bool stream_out_ = false;          // larger than the caches: write around them
  int only_contributor_ = -1;        // broadcast: the only contributor
  uint64_t reduced_ = 0;             // chunks
  size_t own_bytes_ = 0;             // of our part
  Cursor own_in_, own_out_;
  std::vector<Piece> gathered_;  // allgather, alltoall: where received bytes go
  std::vector<Piece> nothing_;   // rolled back: the pieces of an eager part
  std::vector<size_t> even_;     // parts of an allreduce or broadcast
  std::vector<size_t> received_bytes_;
  std::vector<uint64_t> received_rows_;
  std::vector<const void*> sources_;
  std::vector<Byte*> windows_;
};

}  // namespace perseus

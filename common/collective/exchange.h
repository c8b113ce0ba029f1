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
#include <vector>

#include "collective/exchange_header.h"
#include "collective/group.h"
#include "collective/steps.h"
#include "transport/messages.h"

namespace perseus {

class Exchange final : public Operation {
 public:
  // `links[i]` reaches group rank i; links[me] is null. Links outlive the exchange object.
  Exchange(const std::vector<Link*>& links, int me);

  // Begins; `plan` and `sink` (where sizes vary) must stay valid until done(). Only when done. `header`: what goes
  // first on every link, to which sizes of results are added.
  void start(const ExchangePlan& plan, const ExchangeHeader& header, OutputSink* sink);
  bool step() override;
  bool done() const override { return done_; }
  void abort() noexcept override { done_ = true; }
  // Have all members begun?
  bool agreed() const override { return headers_done_; }
  void roll_back(const std::vector<bool>& began) override;
  std::vector<int> waiting_for() const override;

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

  void restart();
  void choose_parts();
  void send_headers(const ExchangeHeader& header);
  void plan_reduction(bool gather);
  void plan_broadcast();
  void plan_gather();
  void plan_spread();
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
  const int me_;
  bool done_ = true;

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

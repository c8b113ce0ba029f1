// The pairwise exchange behind every collective: each rank sends every other its contribution to that rank's part
// (reduce-scatter), reduces the parts in rank order, and sends the result on (allgather), chunk by chunk, so that
// a chunk is reduced and returned while the next is on its way. Resumable: step() never blocks.
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

#include "base/progress_lock.h"
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
  void start(const ExchangePlan& plan, const ExchangeHeader& header, OutputSink* sink) PERSEUS_REQUIRES(progress_lock);
  bool step() override PERSEUS_REQUIRES(progress_lock);
  bool done() const override PERSEUS_REQUIRES(progress_lock) { return done_; }
  void abort() noexcept override PERSEUS_REQUIRES(progress_lock) { done_ = true; }
  // Have all members begun?
  bool agreed() const override PERSEUS_REQUIRES(progress_lock) { return headers_done_; }
  void roll_back(const std::vector<bool>& began) override PERSEUS_REQUIRES(progress_lock);
  std::vector<int> waiting_for() const override PERSEUS_REQUIRES(progress_lock);

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

  void restart() PERSEUS_REQUIRES(progress_lock);
  void choose_parts() PERSEUS_REQUIRES(progress_lock);
  void send_headers(const ExchangeHeader& header) PERSEUS_REQUIRES(progress_lock);
  void plan_reduction(bool gather) PERSEUS_REQUIRES(progress_lock);
  void plan_broadcast() PERSEUS_REQUIRES(progress_lock);
  void plan_gather() PERSEUS_REQUIRES(progress_lock);
  void plan_spread() PERSEUS_REQUIRES(progress_lock);
  bool check_headers() PERSEUS_REQUIRES(progress_lock);
  void place_outputs() PERSEUS_REQUIRES(progress_lock);

  void settle(const Peer& peer, Flow* flow) const;
  size_t chunk_at(const Flow& flow, uint64_t lag) const;
  uint64_t chunk_index(const Flow& flow, uint64_t lag) const { return flow.result ? flow.turn - lag : flow.turn; }
  void next(const Peer& peer, Flow* flow) const;

  bool eager(const Peer& peer, const Flow& flow) const { return !flow.done && !flow.result && flow.turn <= peer.lag; }
  bool discard(Peer& peer) PERSEUS_REQUIRES(progress_lock);
  bool eager_parts_gone() const PERSEUS_REQUIRES(progress_lock);
  bool send_some(Peer& peer) PERSEUS_REQUIRES(progress_lock);
  bool receive_some(Peer& peer) PERSEUS_REQUIRES(progress_lock);
  bool reduce_some() PERSEUS_REQUIRES(progress_lock);
  bool reduce_ready(size_t n) PERSEUS_REQUIRES(progress_lock);
  void reduce_chunk(size_t n) PERSEUS_REQUIRES(progress_lock);

  std::vector<Peer> peers_ PERSEUS_GUARDED_BY(progress_lock);  // of every group rank; the own entry is unused
  const int me_;
  bool done_ PERSEUS_GUARDED_BY(progress_lock) = true;

  const ExchangePlan* plan_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  OutputSink* sink_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  bool headers_done_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool scheduled_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool rolled_back_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool reduces_ PERSEUS_GUARDED_BY(progress_lock) = false;  // this rank reduces contributions
  // Small: every rank reduces the whole buffer itself.
  bool everyone_owns_all_ PERSEUS_GUARDED_BY(progress_lock) = false;
  bool results_follow_ PERSEUS_GUARDED_BY(progress_lock) = false;      // a reduced chunk is sent on
  bool results_from_input_ PERSEUS_GUARDED_BY(progress_lock) = false;  // what is sent as results is our input
  bool stream_out_ PERSEUS_GUARDED_BY(progress_lock) = false;          // larger than the caches: write around them
  int only_contributor_ PERSEUS_GUARDED_BY(progress_lock) = -1;        // broadcast: the only contributor
  uint64_t reduced_ PERSEUS_GUARDED_BY(progress_lock) = 0;             // chunks
  size_t own_bytes_ PERSEUS_GUARDED_BY(progress_lock) = 0;             // of our part
  Cursor own_in_ PERSEUS_GUARDED_BY(progress_lock);
  Cursor own_out_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Piece> gathered_ PERSEUS_GUARDED_BY(progress_lock);  // allgather, alltoall: where received bytes go
  std::vector<Piece> nothing_ PERSEUS_GUARDED_BY(progress_lock);   // rolled back: the pieces of an eager part
  std::vector<size_t> even_ PERSEUS_GUARDED_BY(progress_lock);     // parts of an allreduce or broadcast
  std::vector<size_t> received_bytes_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<uint64_t> received_rows_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<const void*> sources_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Byte*> windows_ PERSEUS_GUARDED_BY(progress_lock);
};

}  // namespace perseus

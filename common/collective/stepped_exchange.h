// Carries out an allreduce whose algorithm is not pairwise as a list of steps (steps.h), one after the other.
// Resumable: step() never blocks.
//
// Every message of a step is received in the same step of the one who sent it, and what is sent depends on nothing that
// the step receives (but see reduce_next), so the lowest step that is not done anywhere always moves: no deadlock.
#pragma once

#include <vector>

#include "base/progress_lock.h"
#include "collective/exchange_header.h"
#include "collective/group.h"
#include "collective/steps.h"
#include "transport/messages.h"

namespace perseus {

class SteppedExchange final : public Operation {
 public:
  // As an Exchange.
  SteppedExchange(const std::vector<Link*>& links, int me);

  // Begins an allreduce, whose plan must not be needed longer than its pieces; `header` goes first on every link that
  // is used.
  void start(const ExchangePlan& plan, const ExchangeHeader& header) PERSEUS_REQUIRES(progress_lock);
  bool step() override PERSEUS_REQUIRES(progress_lock);
  bool done() const override PERSEUS_REQUIRES(progress_lock) { return at_ == steps_.size(); }
  void abort() noexcept override PERSEUS_REQUIRES(progress_lock) { at_ = steps_.size(); }
  std::vector<int> waiting_for() const override PERSEUS_REQUIRES(progress_lock);

 private:
  struct Peer {
    Link* link = nullptr;
    MessageSender sender;
    MessageReceiver receiver;
    ExchangeHeader out;
    bool header_seen = false;
  };

  void make_steps(const ExchangePlan& plan) PERSEUS_REQUIRES(progress_lock);
  void begin_step() PERSEUS_REQUIRES(progress_lock);
  Peer& peer(int member) PERSEUS_REQUIRES(progress_lock) { return peers_[static_cast<size_t>(member)]; }
  bool send_some() PERSEUS_REQUIRES(progress_lock);
  bool receive_some() PERSEUS_REQUIRES(progress_lock);
  bool reduce_next(Peer& from, size_t n) PERSEUS_REQUIRES(progress_lock);
  bool place_next(Peer& from, size_t n) PERSEUS_REQUIRES(progress_lock);

  std::vector<Peer> peers_ PERSEUS_GUARDED_BY(progress_lock);
  const int me_;
  kernels::ReduceSpec partial_ PERSEUS_GUARDED_BY(progress_lock);
  kernels::ReduceSpec last_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<size_t> parts_ PERSEUS_GUARDED_BY(progress_lock);  // of a ring
  std::vector<Piece> run_ PERSEUS_GUARDED_BY(progress_lock);     // in the order that steps speak of
  std::vector<Step> steps_ PERSEUS_GUARDED_BY(progress_lock);
  size_t at_ PERSEUS_GUARDED_BY(progress_lock) = 0;        // the step under way
  size_t sent_ PERSEUS_GUARDED_BY(progress_lock) = 0;      // bytes of it, in whole messages
  size_t received_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // likewise
  Cursor source_ PERSEUS_GUARDED_BY(progress_lock);
  Cursor target_ PERSEUS_GUARDED_BY(progress_lock);
};

}  // namespace perseus

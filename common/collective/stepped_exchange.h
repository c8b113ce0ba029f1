// Carries out an allreduce whose algorithm is not pairwise as a list of steps (steps.h), one after the other.
// Resumable: step() never blocks. Used by one progress engine.
//
// Every message of a step is received in the same step of the one who sent it, and what is sent depends on nothing that
// the step receives (but see reduce_next), so the lowest step that is not done anywhere always moves: no deadlock.
#pragma once

#include <vector>

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
  void start(const ExchangePlan& plan, const ExchangeHeader& header);
  bool step() override;
  bool done() const override { return at_ == steps_.size(); }
  void abort() noexcept override { at_ = steps_.size(); }
  std::vector<int> waiting_for() const override;

 private:
  struct Peer {
    Link* link = nullptr;
    MessageSender sender;
    MessageReceiver receiver;
    ExchangeHeader out;
    bool header_seen = false;
  };

  void make_steps(const ExchangePlan& plan);
  void begin_step();
  Peer& peer(int member) { return peers_[static_cast<size_t>(member)]; }
  bool send_some();
  bool receive_some();
  bool reduce_next(Peer& from, size_t n);
  bool place_next(Peer& from, size_t n);

  std::vector<Peer> peers_;
  const int me_;
  kernels::ReduceSpec partial_, last_;
  std::vector<size_t> parts_;  // of a ring
  std::vector<Piece> run_;     // in the order that steps speak of
  std::vector<Step> steps_;
  size_t at_ = 0;                   // the step under way
  size_t sent_ = 0, received_ = 0;  // bytes of it, in whole messages
  Cursor source_, target_;
};

}  // namespace perseus

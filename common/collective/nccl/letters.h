// Letters between the members of a group, all of one size: sent without waiting, and read in the order in which each
// member has sent its own.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/progress_lock.h"
#include "nccl/library.h"
#include "transport/messages.h"

namespace perseus {

struct Letter {
  enum class Kind : uint32_t { kHello, kOutcome, kReady, kLaunch, kFarewell };
  static constexpr uint32_t kMagic = 0x504e434c;  // "PNCL"

  uint32_t magic = kMagic;
  uint32_t epoch = 0;
  Kind kind = Kind::kHello;
  // kReady, kLaunch: of which collective they speak (NcclOrder::Collective), and how many members take part in it.
  uint32_t set = 0, first = 0, stream = 0, members = 0;
  // kHello, kOutcome: 0 = NCCL can be used here. kReady, kLaunch: 0 = by NCCL, else through host memory.
  int32_t code = 0;
  uint32_t shares_gpus = 0;  // kHello
  char gpu[16] = {};         // kHello
  nccl::UniqueId id = {};    // kHello of member 0
  char text[140] = {};       // why not
};
static_assert(sizeof(Letter) == 320, "what goes over a link");

class Letters {
 public:
  // `links[i]` reaches member i; null = it gets and sends no letters, or not yet. They are used by nobody else and
  // outlive this.
  Letters(const std::vector<Link*>& links, int me, uint32_t epoch);
  void open(int member, Link* link);

  int members() const { return static_cast<int>(peers_.size()); }
  int me() const { return me_; }
  void send(int member, Letter letter) PERSEUS_REQUIRES(progress_lock);
  void send_to_all(const Letter& letter) PERSEUS_REQUIRES(progress_lock);
  // Moves what can be moved; true when anything did.
  bool flush() PERSEUS_REQUIRES(progress_lock);
  // The next one of the member; false while there is none. Throws Error(kInternal) if it is no letter of this world.
  bool receive(int member, Letter* letter) PERSEUS_REQUIRES(progress_lock);

 private:
  struct Peer {
    bool open = false;
    MessageSender sender;
    MessageReceiver receiver;
    std::deque<Letter> out;
    std::vector<Piece> piece;  // of the first of them
    Cursor at;
  };
  Peer& peer(int member) PERSEUS_REQUIRES(progress_lock) { return peers_[static_cast<size_t>(member)]; }
  static void begin(Peer* peer) PERSEUS_REQUIRES(progress_lock);

  std::vector<Peer> peers_;
  const int me_;
  const uint32_t epoch_;
};

}  // namespace perseus

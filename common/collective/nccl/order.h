// The one order in which ranks give work to NCCL, for all communicators of their process sets. NCCL needs it to be the
// same on all of them, whatever became ready first on each: two collectives that begin in different orders may wait for
// each other inside the GPUs. So of the ranks that communicators may join, every one tells the first what it could
// begin, and begins what that rank says once all could. It need not be a member of the process sets that it serves.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/progress_lock.h"
#include "collective/nccl/letters.h"
#include "cuda/device.h"

namespace perseus {

class NcclCommunicator;

// Between the rank that gives turns and each other one. No process set has it.
constexpr Channel kNcclOrderChannel{UINT32_MAX, kLettersStream};

// What all communicators of a process run on: the streams of one GPU, which is theirs alone in this process. Between
// two worlds, ranks would need an order, too.
struct NcclStreams {
  ~NcclStreams();  // the device must be current

  int device = -1;
  cuda::Handle sums = nullptr;
  // For what is copied to the host behind a collective. The device's own stream would do that behind tensors that are
  // still being computed.
  cuda::Handle to_host = nullptr;
};

class NcclOrder {
 public:
  struct Settings {
    int rank = 0;                             // of the world, like all that follow
    std::function<std::vector<int>()> ranks;  // that communicators may join, rising. Called once.
    uint32_t epoch = 0;
    std::function<Link&(int rank)> link_to;
    std::function<void(int rank)> call;  // lets that rank make its end of the link to us
    std::function<bool()> over;          // has the world failed?
  };
  explicit NcclOrder(Settings settings) : settings_(std::move(settings)) {}
  ~NcclOrder();

  // May all these ranks have a communicator? Any thread.
  bool serves(const std::vector<int>& ranks);
  // May tensors of this GPU wait there for NCCL? Of a process, the world that asks first has the GPU. Any thread.
  bool claims(int device);

  // From now on a communicator may get turns; `set` numbers its process set, for ever.
  void attach(uint32_t set, NcclCommunicator* communicator, cuda::Device* device) PERSEUS_REQUIRES(progress_lock);
  // It gets none any more.
  void detach(uint32_t set) noexcept PERSEUS_REQUIRES(progress_lock);
  // Where the world has failed: ends what all communicators have under way, without waiting for that.
  void abort_all() noexcept PERSEUS_REQUIRES(progress_lock);
  std::shared_ptr<NcclStreams> streams() const PERSEUS_REQUIRES(progress_lock) { return streams_; }

  // One of a communicator's collectives, of which one may be under way on each stream of its process set. `first`: of
  // the ranks that it joins, as a process set may have several communicators on a host that counts as several.
  static constexpr uint32_t kMostStreams = 64;
  struct Collective {
    uint32_t set = 0, first = 0, stream = 0;
    std::tuple<uint32_t, uint32_t, uint32_t> key() const { return {set, first, stream}; }
    bool operator==(const Collective& other) const { return key() == other.key(); }
    bool operator<(const Collective& other) const { return key() < other.key(); }
  };
  enum class Turn : uint8_t { kWait, kNccl, kHost };
  // This rank could begin, as one of so many members; `able`: with NCCL, else all of them do without it.
  void ready(const Collective& collective, int members, bool able) PERSEUS_REQUIRES(progress_lock);
  // After ready(), kNccl or kHost once. After kNccl, nobody else's turn comes before end_turn().
  Turn turn(const Collective& collective) PERSEUS_REQUIRES(progress_lock);
  void end_turn() PERSEUS_REQUIRES(progress_lock) { in_turn_ = false; }
  // Does this rank give turns? Then it knows which ranks could begin.
  bool gives_turns() PERSEUS_REQUIRES(progress_lock) { return me() == 0; }
  bool is_ready(const Collective& collective, int rank) PERSEUS_REQUIRES(progress_lock);

  // Passes on letters; true when anything moved.
  bool step() PERSEUS_REQUIRES(progress_lock);
  // Does some rank wait here for others?
  bool waits() const PERSEUS_REQUIRES(progress_lock) { return !waiting_.empty(); }
  // A rank has made its end of the link.
  void on_called(int rank) PERSEUS_REQUIRES(progress_lock);
  // A rank has left the world. Where it gave turns, what gets none any more is done without NCCL.
  void on_left(int rank) PERSEUS_REQUIRES(progress_lock);
  bool has_left() const PERSEUS_REQUIRES(progress_lock) { return left_ns_ != 0; }

 private:
  static constexpr int kNoDevice = -1;

  const std::vector<int>& ranks();
  int index_of(int rank);  // -1: not one of them
  int me() { return index_of(settings_.rank); }
  Letters& letters() PERSEUS_REQUIRES(progress_lock);
  void on_letter(int from, const Letter& letter) PERSEUS_REQUIRES(progress_lock);
  void forget(int from, uint32_t set) noexcept PERSEUS_REQUIRES(progress_lock);
  void note_ready(int from, const Collective& collective, int members, bool able) PERSEUS_REQUIRES(progress_lock);
  void give_turn(const Collective& collective, bool by_nccl) PERSEUS_REQUIRES(progress_lock);

  const Settings settings_;
  std::once_flag ranks_known_;
  std::vector<int> ranks_;
  std::atomic<int> claimed_{kNoDevice};

  cuda::Device* device_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  std::shared_ptr<NcclStreams> streams_ PERSEUS_GUARDED_BY(progress_lock);
  std::map<uint32_t, NcclCommunicator*> communicators_ PERSEUS_GUARDED_BY(progress_lock);
  std::unique_ptr<Letters> letters_ PERSEUS_GUARDED_BY(progress_lock);  // between the first rank and each other one
  struct Given {
    Collective collective;
    bool by_nccl;
  };
  std::deque<Given> turns_ PERSEUS_GUARDED_BY(progress_lock);
  bool in_turn_ PERSEUS_GUARDED_BY(progress_lock) = false;
  uint32_t set_in_turn_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  int64_t left_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // when the rank that gives turns left; 0 = it is there
  // Of that rank: which others could begin, and whether all of them with NCCL.
  struct Waiting {
    std::vector<int> ready;
    int members = 0;
    bool able = true;
  };
  std::map<Collective, Waiting> waiting_ PERSEUS_GUARDED_BY(progress_lock);
};

}  // namespace perseus

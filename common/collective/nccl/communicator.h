// The NCCL communicator of members of a process set, of one host or of all, and the order in which they give it work.
// NCCL needs that order to be the same on all of them, whatever became ready first on each: two collectives that begin
// in different orders may wait for each other inside the GPUs. So every member tells member 0 what it could begin, and
// begins what member 0 says once all could. It is made when the first tensors come that stay on their GPUs, without
// anybody blocking.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/progress_lock.h"
#include "collective/nccl/letters.h"
#include "cuda/device.h"
#include "nccl/library.h"

namespace perseus {

struct NcclSettings {
  std::string library;                               // see nccl::Library::get()
  std::string of_whom;                               // "of this host": for messages
  int64_t join_ns = 0;                               // that joining may take; 0 = any time
  std::function<void()> poll;                        // looks for letters, for who waits for them
  std::function<void(const std::string& text)> log;  // for why NCCL is not used
};

class NcclCommunicator {
 public:
  using MakeLetters = std::function<std::unique_ptr<Letters>()>;
  // `make_letters`: to all of them, called when first needed.
  NcclCommunicator(NcclSettings settings, MakeLetters make_letters);
  ~NcclCommunicator();

  // May tensors of this GPU wait there for NCCL, as far as this member knows? Any thread. Of a GPU, one communicator of
  // a process takes tensors, the first that is asked: between several, ranks would need an order, too.
  bool takes(int device);

  // ---- making it ----

  enum class State : uint8_t { kNew, kGreeting, kJoining, kConcluding, kJoined, kRefused };
  // Makes it, of these members' GPUs, and passes on letters; true when anything moved. Until it is kJoined or kRefused,
  // which all members agree on.
  bool step(cuda::Device* device) PERSEUS_REQUIRES(progress_lock);
  State state() const { return state_.load(std::memory_order_relaxed); }

  // ---- its order, once it is joined ----

  // Of collectives, one of which may be under way on each stream of the process set.
  static constexpr uint32_t kMostStreams = 64;
  enum class Turn : uint8_t { kWait, kNccl, kHost };
  // This member could begin; `able`: with NCCL, else all members do without it.
  void ready(uint32_t stream, bool able) PERSEUS_REQUIRES(progress_lock);
  // After ready(), kNccl or kHost once. After kNccl, nobody else's turn comes before enqueued().
  Turn turn(uint32_t stream) PERSEUS_REQUIRES(progress_lock);
  // Has NCCL taken what it was given in this turn? Then the turn ends.
  bool enqueued() PERSEUS_REQUIRES(progress_lock);
  // Of what NCCL has taken and does not end: throws Error(kIo) where the communicator has failed. NCCL says the same of
  // a member that has left, which it does once its part is done, and of a network that has failed: the first is over
  // soon.
  void check() PERSEUS_REQUIRES(progress_lock);

  nccl::Handle handle() const PERSEUS_REQUIRES(progress_lock) { return handle_; }
  // On which all of it runs, and one for what is copied to the host behind it. The device's own would do that behind
  // tensors that are still being computed.
  cuda::Handle stream() const PERSEUS_REQUIRES(progress_lock) { return stream_; }
  cuda::Handle to_host() const PERSEUS_REQUIRES(progress_lock) { return to_host_; }
  int members() const PERSEUS_REQUIRES(progress_lock) { return letters_->members(); }
  int me() const PERSEUS_REQUIRES(progress_lock) { return letters_->me(); }
  const nccl::Library& library() const { return nccl::Library::get(settings_.library); }
  // Members that are not known to have come as far as this one; for messages.
  std::vector<int> waiting_for(uint32_t stream) const PERSEUS_REQUIRES(progress_lock);
  // Ends whatever is under way: when it returns true, nothing of it touches memory any more. False where the GPU does
  // not get that far, because something else on it never ends.
  bool abort() noexcept PERSEUS_REQUIRES(progress_lock);

 private:
  static constexpr int kNoDevice = -1;
  // Buckets in a row for which some member was not able.
  static constexpr int kMostUnable = 8;

  void greet() PERSEUS_REQUIRES(progress_lock);
  bool read() PERSEUS_REQUIRES(progress_lock);
  void on_letter(int from, const Letter& letter) PERSEUS_REQUIRES(progress_lock);
  void join() PERSEUS_REQUIRES(progress_lock);
  const Letter* failed() const PERSEUS_REQUIRES(progress_lock);
  void conclude(nccl::Result result, const std::string& why = "") PERSEUS_REQUIRES(progress_lock);
  void refuse(const std::string& why) PERSEUS_REQUIRES(progress_lock);
  bool claims(int device);
  nccl::Result ask() PERSEUS_REQUIRES(progress_lock);
  void take_leave() noexcept PERSEUS_REQUIRES(progress_lock);
  void note_ready(int member, uint32_t stream, bool able) PERSEUS_REQUIRES(progress_lock);
  void give_turns() PERSEUS_REQUIRES(progress_lock);

  const NcclSettings settings_;
  const MakeLetters make_letters_;
  std::atomic<int> claimed_{kNoDevice};  // the GPU whose tensors it takes, alone in this process
  std::atomic<bool> missing_{false};     // there is no library that would do
  std::atomic<State> state_{State::kNew};
  std::atomic<int> unable_{0};  // turns that were not NCCL's

  std::unique_ptr<Letters> letters_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Letter> hellos_ PERSEUS_GUARDED_BY(progress_lock);    // by member
  std::vector<Letter> outcomes_ PERSEUS_GUARDED_BY(progress_lock);  // likewise
  std::vector<bool> greeted_ PERSEUS_GUARDED_BY(progress_lock),
      concluded_ PERSEUS_GUARDED_BY(progress_lock), left_ PERSEUS_GUARDED_BY(progress_lock);
  cuda::Device* device_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  cuda::Handle stream_ PERSEUS_GUARDED_BY(progress_lock) = nullptr, to_host_
                                                                    PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  nccl::Handle handle_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;

  struct Ending;
  std::shared_ptr<Ending> ending_ PERSEUS_GUARDED_BY(progress_lock);  // null = nothing had to be ended
  struct Given {
    uint32_t stream;
    bool by_nccl;
  };
  std::deque<Given> turns_ PERSEUS_GUARDED_BY(progress_lock);
  int64_t joining_since_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  bool stuck_ PERSEUS_GUARDED_BY(progress_lock) = false;  // abort() was in vain
  bool in_turn_ PERSEUS_GUARDED_BY(progress_lock) = false;
  int64_t remote_error_since_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // during the last collective; 0 = none
  // Of member 0, by stream: how many members could begin, and whether all of them with NCCL.
  std::vector<std::vector<bool>> waiting_ PERSEUS_GUARDED_BY(progress_lock);  // by stream and member
  std::vector<bool> able_ PERSEUS_GUARDED_BY(progress_lock);
};

}  // namespace perseus

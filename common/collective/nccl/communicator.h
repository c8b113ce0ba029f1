// The NCCL communicator of members of a process set, of one host or of all. It is made when the first tensors come that
// stay on their GPUs, without anybody blocking, and gets its turns from the NcclOrder of all communicators.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress_lock.h"
#include "collective/nccl/call_thread.h"
#include "collective/nccl/letters.h"
#include "collective/nccl/order.h"
#include "cuda/device.h"
#include "nccl/library.h"

namespace perseus {

struct NcclSettings {
  std::string library;                               // see nccl::Library::get()
  std::string of_whom;                               // "of this host": for messages
  std::function<int(int member)> rank_of;            // in the world
  int64_t join_ns = 0;                               // that joining may take; 0 = any time,
  std::string join_limit;                            // in words
  std::function<void()> poll;                        // looks for letters, for who waits for them
  std::function<void(const std::string& text)> log;  // for why NCCL is not used
};

class NcclCommunicator {
 public:
  using MakeLetters = std::function<std::unique_ptr<Letters>()>;
  // `make_letters`: to all of them, called when first needed. `order` outlives it; `number` tells this rank's
  // communicators apart there.
  NcclCommunicator(NcclSettings settings, NcclOrder* order, uint32_t number, MakeLetters make_letters);
  ~NcclCommunicator();

  // May tensors of this GPU wait there for NCCL, as far as this member knows? Any thread.
  bool takes(int device);

  // ---- making it ----

  enum class State : uint8_t { kNew, kGreeting, kJoining, kConcluding, kJoined, kRefused };
  // Makes it, of these members' GPUs, and passes on letters; true when anything moved. Until it is kJoined or kRefused,
  // which all members agree on.
  bool step(cuda::Device* device) PERSEUS_REQUIRES(progress_lock);
  State state() const { return state_.load(std::memory_order_relaxed); }

  // ---- once it is joined ----

  // One collective may be under way on each stream of the process set: see NcclOrder.
  void ready(uint32_t stream, bool able) PERSEUS_REQUIRES(progress_lock) {
    order_.ready(collective_on(stream), members(), able);
  }
  NcclOrder::Turn turn(uint32_t stream) PERSEUS_REQUIRES(progress_lock);
  // Calls NCCL in this turn, perhaps on another thread. Throws Error(kIo) in NCCL's words, or enqueued() does.
  using Call = std::function<nccl::Result(const nccl::Functions& nccl, nccl::Handle communicator)>;
  void call(const char* what, const Call& call) PERSEUS_REQUIRES(progress_lock);
  // Has NCCL taken what it was given in this turn? Then the turn ends.
  bool enqueued() PERSEUS_REQUIRES(progress_lock);
  // Of what NCCL has taken and does not end: throws Error(kIo) where the communicator has failed. NCCL says the same of
  // a member that has left, which it does once its part is done, and of a network that has failed: the first is over
  // soon.
  void check() PERSEUS_REQUIRES(progress_lock);

  cuda::Handle stream() const PERSEUS_REQUIRES(progress_lock) { return streams_->sums; }
  cuda::Handle to_host() const PERSEUS_REQUIRES(progress_lock) { return streams_->to_host; }
  int members() const PERSEUS_REQUIRES(progress_lock) { return letters_->members(); }
  int me() const PERSEUS_REQUIRES(progress_lock) { return letters_->me(); }
  const nccl::Library& library() const { return nccl::Library::get(settings_.library); }
  // Members that are not known to have come as far as this one; for messages.
  std::vector<int> waiting_for(uint32_t stream) const PERSEUS_REQUIRES(progress_lock);
  // Ends whatever is under way: when it returns true, nothing of it touches memory any more. False where the GPU does
  // not get that far, because something else on it never ends. Collectives of other communicators may be in front, and
  // wait for ranks that are lost: then they end, too.
  bool abort() noexcept PERSEUS_REQUIRES(progress_lock);
  // The same, without waiting for the end. `is_idle`: nothing of it is under way on the GPU.
  void begin_abort(bool is_idle = false) noexcept PERSEUS_REQUIRES(progress_lock);

 private:
  // Buckets in a row for which some member was not able.
  static constexpr int kMostUnable = 8;

  NcclOrder::Collective collective_on(uint32_t stream) const {
    return {number_, static_cast<uint32_t>(settings_.rank_of(0)), stream};
  }
  void greet() PERSEUS_REQUIRES(progress_lock);
  bool read() PERSEUS_REQUIRES(progress_lock);
  void on_letter(int from, const Letter& letter) PERSEUS_REQUIRES(progress_lock);
  void join() PERSEUS_REQUIRES(progress_lock);
  // Of what join() has begun.
  nccl::Result joined() PERSEUS_REQUIRES(progress_lock);
  // On a thread of its own.
  void call_apart(std::function<nccl::Result()> call) PERSEUS_REQUIRES(progress_lock);
  const Letter* failed() const PERSEUS_REQUIRES(progress_lock);
  void conclude(nccl::Result result, const std::string& why = "") PERSEUS_REQUIRES(progress_lock);
  void refuse(const std::string& why) PERSEUS_REQUIRES(progress_lock);
  nccl::Result ask() PERSEUS_REQUIRES(progress_lock);
  bool take_leave() noexcept PERSEUS_REQUIRES(progress_lock);
  bool await_end(std::chrono::nanoseconds patience) noexcept PERSEUS_REQUIRES(progress_lock);
  bool end_abort() noexcept PERSEUS_REQUIRES(progress_lock);

  const NcclSettings settings_;
  NcclOrder& order_;
  const uint32_t number_;
  const MakeLetters make_letters_;
  std::atomic<bool> missing_{false};  // there is no library that would do
  std::atomic<State> state_{State::kNew};
  std::atomic<int> unable_{0};  // turns that were not NCCL's

  std::unique_ptr<Letters> letters_ PERSEUS_GUARDED_BY(progress_lock);
  std::vector<Letter> hellos_ PERSEUS_GUARDED_BY(progress_lock);    // by member
  std::vector<Letter> outcomes_ PERSEUS_GUARDED_BY(progress_lock);  // likewise
  std::vector<bool> greeted_ PERSEUS_GUARDED_BY(progress_lock),
      concluded_ PERSEUS_GUARDED_BY(progress_lock), left_ PERSEUS_GUARDED_BY(progress_lock);
  cuda::Device* device_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  std::shared_ptr<NcclStreams> streams_ PERSEUS_GUARDED_BY(progress_lock);
  // NCCL writes it, and who ends it reads it, maybe after this has gone. Null = there is none, or it has been ended.
  std::shared_ptr<nccl::Handle> made_ PERSEUS_GUARDED_BY(progress_lock);
  nccl::Handle handle_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;       // the same, once NCCL has written it
  std::unique_ptr<CallThread> caller_ PERSEUS_GUARDED_BY(progress_lock);  // null = not needed so far
  int64_t joining_since_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  bool stuck_ PERSEUS_GUARDED_BY(progress_lock) = false;                 // abort() was in vain
  int64_t remote_error_since_ns_ PERSEUS_GUARDED_BY(progress_lock) = 0;  // during the last collective; 0 = none
};

}  // namespace perseus

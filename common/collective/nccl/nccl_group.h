// The Group of members that NCCL joins, for tensors that stay on their GPUs: NCCL sums them there. Of an allreduce in
// stages every member's shard of the sum then goes to the image in host memory, where the exchange between hosts reads
// it, and what comes back is spread by NCCL again. A shard without an image stays on its GPU between the two, which
// encodes it there (cuda/encoding.h). Where NCCL does not join the members, the same work is done on images of
// everything by another Group.
#pragma once

#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/group.h"
#include "collective/nccl/communicator.h"
#include "cuda/staging.h"

namespace perseus {

class NcclGroup final : public Group, private Operation {
 public:
  // `host` does the same between images. `stream`: of the process set, of which one piece of work at a time is planned.
  NcclGroup(NcclCommunicator* communicator, Group* host, uint32_t stream);

  bool serves(const Work& work) const override PERSEUS_REQUIRES(progress_lock) {
    return work.device.kind == Device::Kind::kCuda && work.staged == nullptr;
  }
  bool rolls_back(const Work&) const override PERSEUS_REQUIRES(progress_lock) { return false; }
  Operation& plan(const Work& work) override PERSEUS_REQUIRES(progress_lock);
  size_t staging_bytes() const override PERSEUS_REQUIRES(progress_lock) { return memory_.bytes(); }

 private:
  enum class Phase : uint8_t { kJoin, kTurn, kEnqueued, kSummed, kFinish, kLoad, kHost, kDone };

  bool step() override PERSEUS_REQUIRES(progress_lock);
  bool done() const override PERSEUS_REQUIRES(progress_lock) { return phase_ == Phase::kDone; }
  void abort() noexcept override PERSEUS_REQUIRES(progress_lock);
  bool wakes() const override PERSEUS_REQUIRES(progress_lock) {
    return phase_ == Phase::kDone || (phase_ == Phase::kHost && on_host_->wakes());
  }
  std::vector<int> waiting_for() const override PERSEUS_REQUIRES(progress_lock);

  bool prepare() PERSEUS_REQUIRES(progress_lock);
  void launch() PERSEUS_REQUIRES(progress_lock);
  void take_results() PERSEUS_REQUIRES(progress_lock);
  void begin_on_host() PERSEUS_REQUIRES(progress_lock);
  void begin_exchange() PERSEUS_REQUIRES(progress_lock);
  void finish_on_host() PERSEUS_REQUIRES(progress_lock);
  void end() PERSEUS_REQUIRES(progress_lock);
  // Throws Error(kIo) where NCCL has failed meanwhile.
  bool gpu_has_come_to_last() PERSEUS_REQUIRES(progress_lock);
  void wait_for(cuda::Handle stream, cuda::Handle earlier) PERSEUS_REQUIRES(progress_lock);
  cuda::Device& device() const PERSEUS_REQUIRES(progress_lock) { return work_.images->device(); }
  const ExchangePlan& plan() const PERSEUS_REQUIRES(progress_lock) { return *work_.plan; }
  // Of each member's part in our memory, which are all as long as the longest.
  Byte* part(int member) const PERSEUS_REQUIRES(progress_lock) {
    return memory_at_ + static_cast<size_t>(member) * part_bytes_;
  }

  NcclCommunicator& communicator_;
  Group& host_;
  const uint32_t stream_;

  Work work_ PERSEUS_GUARDED_BY(progress_lock);
  Phase phase_ PERSEUS_GUARDED_BY(progress_lock) = Phase::kDone;
  size_t part_bytes_ PERSEUS_GUARDED_BY(progress_lock) = 0;
  cuda::DeviceMemory memory_ PERSEUS_GUARDED_BY(progress_lock);
  Byte* memory_at_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  cuda::Copies copies_ PERSEUS_GUARDED_BY(progress_lock);                      // from or to the host
  cuda::Copies moves_ PERSEUS_GUARDED_BY(progress_lock);                       // on the device
  std::shared_ptr<const cuda::Event> last_ PERSEUS_GUARDED_BY(progress_lock);  // behind all that was given to streams
  Operation* on_host_ PERSEUS_GUARDED_BY(progress_lock) = nullptr;
  // Of what goes through the host and has no images.
  ExchangePlan on_block_ PERSEUS_GUARDED_BY(progress_lock);
  cuda::Device::Block block_ PERSEUS_GUARDED_BY(progress_lock);
};

}  // namespace perseus

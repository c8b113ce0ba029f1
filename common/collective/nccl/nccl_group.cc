// One collective at a time: packed, handed to NCCL in its turn, and unpacked.
#include "collective/nccl/nccl_group.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace perseus {
namespace {

constexpr size_t kAlign = 16;  // of parts, so that NCCL moves them in its widest words, and of tensors for our kernels

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

NcclGroup::NcclGroup(NcclCommunicator* communicator, Group* host, uint32_t stream)
    : communicator_(*communicator), host_(*host), stream_(stream) {}

Operation& NcclGroup::plan(const Work& work) {
  work_ = work;
  phase_ = Phase::kJoin;
  last_.reset();
  return *this;
}

bool NcclGroup::step() {
  switch (phase_) {
    case Phase::kJoin: {
      const bool moved = communicator_.step(&device());
      if (communicator_.state() == NcclCommunicator::State::kRefused) {
        begin_on_host();
      } else if (communicator_.state() == NcclCommunicator::State::kJoined) {
        communicator_.ready(stream_, prepare());
        phase_ = Phase::kTurn;
      } else {
        return moved;
      }
      return true;
    }
    case Phase::kTurn: {
      const bool moved = communicator_.step(&device());
      const NcclOrder::Turn turn = communicator_.turn(stream_);
      if (turn == NcclOrder::Turn::kWait) return moved;
      if (turn == NcclOrder::Turn::kHost) begin_on_host();
      else launch();
      return true;
    }
    case Phase::kEnqueued:
      if (!communicator_.enqueued()) return false;
      {
        const cuda::Device::Current current(device());
        last_ = device().record(communicator_.stream());
      }
      phase_ = Phase::kSummed;
      return true;
    case Phase::kSummed:
      if (communicator_.state() != NcclCommunicator::State::kJoined)
        fail(ErrorKind::kIo, "[nccl] the communicator has been ended");
      // Not earlier: what is given to the stream behind a collective that fails would be written whenever that ends.
      if (!gpu_has_come_to_last()) return false;
      take_results();
      phase_ = Phase::kFinish;
      return true;
    case Phase::kFinish:
      if (!gpu_has_come_to_last()) return false;
      end();
      return true;
    case Phase::kLoad:
      if (!last_->poll()) return false;
      begin_exchange();
      return true;
    case Phase::kHost: {
      const bool moved = on_host_->step();
      if (on_host_->done()) finish_on_host();
      return moved;
    }
    case Phase::kDone:
      break;
  }
  return false;
}

bool NcclGroup::gpu_has_come_to_last() {
  if (last_->poll()) return true;
  communicator_.check();
  return false;
}

void NcclGroup::wait_for(cuda::Handle stream, cuda::Handle earlier) {
  const cuda::Driver& driver = cuda::Driver::get();
  last_ = device().record(earlier);
  driver.check(driver.call().stream_wait(stream, last_->handle(), 0), "cuStreamWaitEvent");
}

// What can be done before our turn. False where there is no memory for it on the device.
bool NcclGroup::prepare() {
  const cuda::Device::Current current(device());
  const bool parted = plan().collective != Collective::kAllreduce;
  part_bytes_ = 0;
  if (parted) part_bytes_ = aligned(*std::max_element(plan().parts.begin(), plan().parts.end()));
  else
    for (const Piece& piece : plan().pieces) part_bytes_ += aligned(piece.bytes);
  const int parts = parted ? communicator_.members() : 1;
  try {
    memory_at_ = memory_.at_least(static_cast<size_t>(parts) * part_bytes_, &device());
  } catch (const Error&) {
    return false;
  }
  if (plan().collective == Collective::kSpread) {
    // Our part, from the image or from where a kernel before has decoded it.
    Byte* to = part(communicator_.me());
    for (const Piece& piece : plan().pieces) {
      const cuda::Images::Place place = work_.images->at(piece.in);
      if (place.has_image) copies_.add(to, piece.in, piece.bytes);
      else moves_.add(to, place.out, piece.bytes);
      to += piece.bytes;
    }
    copies_.store(device().to_device());
    wait_for(communicator_.stream(), device().to_device());
    moves_.move(device(), communicator_.stream());
    last_ = device().record(communicator_.stream());
    return true;
  }
  // Everybody's parts, each from its beginning.
  size_t member = 0, in_part = 0;
  for (const Piece& piece : plan().pieces) {
    const Byte* from = work_.images->at(piece.in).in;
    for (size_t done = 0; done < piece.bytes;) {
      while (parted && in_part == plan().parts[member]) {
        ++member;
        in_part = 0;
      }
      const size_t run = parted ? std::min(piece.bytes - done, plan().parts[member] - in_part) : piece.bytes;
      moves_.add(part(static_cast<int>(member)) + in_part, from + done, run);
      in_part += parted ? run : aligned(run);
      done += run;
    }
  }
  moves_.move(device(), communicator_.stream());
  last_ = device().record(communicator_.stream());
  return true;
}

void NcclGroup::launch() {
  const cuda::Device::Current current(device());
  const DType dtype = plan().reduction.dtype;
  const size_t count = part_bytes_ / dtype_size(dtype);
  const int type = nccl::type_of(dtype);
  Byte* const own = part(plan().collective == Collective::kAllreduce ? 0 : communicator_.me());
  const cuda::Handle stream = communicator_.stream();
  const int op = plan().reduction.divisor == 1 ? nccl::kSum : nccl::kAverage;
  switch (plan().collective) {
    case Collective::kReduceScatter:
      communicator_.call("ncclReduceScatter",
                         [all = memory_at_, own, count, type, stream](const auto& nccl, nccl::Handle communicator) {
                           return nccl.reduce_scatter(all, own, count, type, nccl::kSum, communicator, stream);
                         });
      break;
    case Collective::kSpread:
      communicator_.call("ncclAllGather",
                         [all = memory_at_, own, count, type, stream](const auto& nccl, nccl::Handle communicator) {
                           return nccl.allgather(own, all, count, type, communicator, stream);
                         });
      break;
    default:
      communicator_.call("ncclAllReduce",
                         [all = memory_at_, count, type, op, stream](const auto& nccl, nccl::Handle communicator) {
                           return nccl.allreduce(all, all, count, type, op, communicator, stream);
                         });
  }
  phase_ = Phase::kEnqueued;
}

// Our part of a sum goes to the image, where there is one; all others stay on the device.
void NcclGroup::take_results() {
  const cuda::Device::Current current(device());
  if (plan().collective == Collective::kReduceScatter) {
    const Byte* from = part(communicator_.me());
    for (const Piece& piece : plan().result) {
      const cuda::Images::Place place = work_.images->at(piece.out);
      if (place.has_image) copies_.add(piece.out, from, piece.bytes);
      else moves_.add(place.out, from, piece.bytes);
      from += piece.bytes;
    }
    moves_.move(device(), communicator_.stream());
    wait_for(communicator_.to_host(), communicator_.stream());
    copies_.load(communicator_.to_host());
    last_ = device().record(communicator_.to_host());
    return;
  }
  const bool parted = plan().collective == Collective::kSpread;
  size_t member = 0, in_part = 0;
  for (const Piece& piece : parted ? plan().result : plan().pieces) {
    Byte* to = work_.images->at(piece.out).out;
    for (size_t done = 0; done < piece.bytes;) {
      while (parted && in_part == plan().parts[member]) {
        ++member;
        in_part = 0;
      }
      const size_t run = parted ? std::min(piece.bytes - done, plan().parts[member] - in_part) : piece.bytes;
      moves_.add(to + done, part(static_cast<int>(member)) + in_part, run);
      in_part += parted ? run : aligned(run);
      done += run;
    }
  }
  moves_.move(device(), communicator_.stream());
  last_ = device().record(communicator_.stream());
}

// Pieces without images get a place in a block.
void NcclGroup::begin_on_host() {
  const cuda::Device::Current current(device());
  // What was packed in vain may still be under way.
  if (last_) wait_for(communicator_.to_host(), communicator_.stream());
  const bool spreads = plan().collective == Collective::kSpread;
  const auto has_image = [this](const Byte* address)
                             PERSEUS_REQUIRES(progress_lock) { return work_.images->at(address).has_image; };
  // Where a member's part begins, in all of them.
  const auto begin_of = [this](int member) PERSEUS_REQUIRES(progress_lock) {
    return std::accumulate(plan().parts.begin(), plan().parts.begin() + member, size_t{0});
  };
  on_block_ = plan();
  size_t bytes = 0;
  for (const Piece& piece : plan().pieces) bytes += has_image(piece.in) ? 0 : piece.bytes;
  for (const Piece& piece : plan().result) bytes += has_image(piece.out) ? 0 : piece.bytes;
  if (bytes > 0) block_ = device().allocate(bytes);
  Byte* at = block_.data;
  for (Piece& piece : on_block_.pieces) {
    const cuda::Images::Place place = work_.images->at(piece.in);
    if (!place.has_image) {
      piece.in = at;
      if (piece.out != nullptr) piece.out = at;
      at += piece.bytes;
    }
    if (!place.has_image || !spreads)
      copies_.add(const_cast<Byte*>(piece.in), spreads ? place.out : place.in, piece.bytes);
  }
  // What is spread is our own part's result where it is.
  Byte* own = block_.data;
  const size_t own_begin = spreads ? begin_of(communicator_.me()) : 0,
               own_end = spreads ? begin_of(communicator_.me() + 1) : 0;
  size_t begin = 0;
  for (Piece& piece : on_block_.result) {
    const bool is_own = begin >= own_begin && begin < own_end;
    begin += piece.bytes;
    if (has_image(piece.out)) continue;
    Byte*& next = is_own ? own : at;
    piece.out = next;
    next += piece.bytes;
  }
  if (spreads) wait_for(communicator_.to_host(), device().to_device());  // what kernels have decoded
  copies_.load(communicator_.to_host());
  last_ = device().record(communicator_.to_host());
  phase_ = Phase::kLoad;
}

void NcclGroup::begin_exchange() {
  Work work = work_;
  work.plan = &on_block_;
  on_host_ = &host_.plan(work);
  phase_ = Phase::kHost;
}

void NcclGroup::finish_on_host() {
  on_host_ = nullptr;
  const cuda::Device::Current current(device());
  const bool summed = plan().collective == Collective::kReduceScatter;  // of which images have our part
  const bool parted = plan().collective != Collective::kAllreduce;
  const std::vector<Piece>& planned = parted ? plan().result : plan().pieces;
  const std::vector<Piece>& moved = parted ? on_block_.result : on_block_.pieces;
  for (size_t i = 0; i < planned.size(); ++i) {
    const cuda::Images::Place place = work_.images->at(planned[i].out);
    if (!place.has_image || !summed) copies_.add(place.out, moved[i].out, planned[i].bytes);
  }
  copies_.store(device().to_device());
  last_ = device().record(device().to_device());
  phase_ = Phase::kFinish;
}

void NcclGroup::end() {
  phase_ = Phase::kDone;
  if (block_.data != nullptr) device().free(block_, nullptr);
  block_ = cuda::Device::Block();
}

std::vector<int> NcclGroup::waiting_for() const {
  if (phase_ == Phase::kHost) return on_host_->waiting_for();
  return communicator_.waiting_for(stream_);
}

void NcclGroup::abort() noexcept {
  if (phase_ == Phase::kHost) on_host_->abort();
  // What NCCL does is that of all streams, which end together.
  const bool over = communicator_.abort();
  copies_.clear();
  moves_.clear();
  try {
    if (last_ && over) last_->wait();
  } catch (const std::exception&) {
    // The device has failed: it touches nothing any more.
  }
  end();
}

}  // namespace perseus

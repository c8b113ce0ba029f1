// The seam for everything that can move a bucket: exchanges over links, an MPI library, NCCL.
// A Group is a set of ranks, its members, which all plan the same work in the same order. An Operation is one piece of
// that work on its way: it is resumable, and no call of it blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "base/device.h"
#include "base/progress_lock.h"
#include "collective/exchange_plan.h"

namespace perseus {

class Staged;
namespace cuda {
class Images;
}

// What members do together. It stays as it is until the operation is done or aborted.
struct Work {
  const ExchangePlan* plan = nullptr;    // one collective,
  OutputSink* sink = nullptr;            // and who makes room for its output if sizes vary;
  Staged* staged = nullptr;              // or several collectives, one after the other
  uint64_t schedule = 0;                 // fingerprint if members may still leave before they begin it, else 0
  Device device;                         // of all buffers;
  const cuda::Images* images = nullptr;  // then the plan speaks of their images, which may be empty
};

class Operation {
 public:
  virtual ~Operation() = default;
  // Moves what can be moved; true when anything did. Throws Error when a member is lost or does something else.
  virtual bool step() PERSEUS_REQUIRES(progress_lock) = 0;
  // Outputs are written, and nobody touches the buffers any more.
  virtual bool done() const PERSEUS_REQUIRES(progress_lock) = 0;
  // Gives up. When it returns, nobody touches the buffers any more, whatever other members do.
  virtual void abort() noexcept PERSEUS_REQUIRES(progress_lock) = 0;
  // Work with a schedule: do all members take part, as far as this one knows?
  virtual bool agreed() const PERSEUS_REQUIRES(progress_lock) { return true; }
  // Some member will not take part, so that none may finish; began[i]: has member i begun? The operation is done once
  // the links are clean. Not after agreed(), and on all members alike.
  virtual void roll_back(const std::vector<bool>& /*began*/) PERSEUS_REQUIRES(progress_lock) {}
  // Does the Waker report that it can go on? Otherwise somebody must look again soon.
  virtual bool wakes() const PERSEUS_REQUIRES(progress_lock) { return true; }
  // Does it wait for a GPU of this rank, and for no member?
  virtual bool computes() const PERSEUS_REQUIRES(progress_lock) { return false; }
  // Members whose bytes this one waits for, or that do not take its own: for messages.
  virtual std::vector<int> waiting_for() const PERSEUS_REQUIRES(progress_lock) = 0;
};

class Group {
 public:
  virtual ~Group() = default;
  // Can it do this work: its device, dtype, collective and reduction? The same on all members.
  virtual bool serves(const Work& work) const PERSEUS_REQUIRES(progress_lock) = 0;
  // Do outputs stay untouched until agreed(), so that the operation can be rolled back?
  virtual bool rolls_back(const Work& work) const PERSEUS_REQUIRES(progress_lock) = 0;
  // Begins. The operation is the group's and stays valid until the next one, which may begin once this one has ended.
  virtual Operation& plan(const Work& work) PERSEUS_REQUIRES(progress_lock) = 0;
  // Memory that it holds beside tensors and links.
  virtual size_t staging_bytes() const PERSEUS_REQUIRES(progress_lock) { return 0; }
};

}  // namespace perseus

// All ranks of the world as groups of an MPI library, one for each stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/mpi/mpi_group.h"
#include "topology/world.h"

namespace perseus {

class MpiWorld {
 public:
  // Every rank opens it for as many streams. Throws as mpi::Library does, and Error(kInvalidArgument) where MPI numbers
  // the ranks in another way. `interrupted`: as in Store::get.
  MpiWorld(const World& world, int streams, int64_t deadline_ns, const std::function<bool()>& interrupted);
  ~MpiWorld();

  // Each stream's once; the world outlives its groups.
  std::unique_ptr<Group> group(uint32_t stream) const PERSEUS_REQUIRES(progress_lock);

 private:
  const World world_;
  const std::unique_ptr<mpi::Library> library_;
  std::vector<mpi::Handle> communicators_;
};

}  // namespace perseus

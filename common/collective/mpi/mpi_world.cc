// Communicators are made when a world begins, since only then all ranks are known to make the same calls.
#include "collective/mpi/mpi_world.h"

namespace perseus {

MpiWorld::MpiWorld(const World& world, int streams, int64_t deadline_ns, const std::function<bool()>& interrupted)
    : world_(world), library_(mpi::Library::open()) {
  library_->check_ranks(world.rank, world.size);
  for (int i = 0; i < streams; ++i)
    communicators_.push_back(library_->duplicate(library_->world(), deadline_ns, interrupted));
}

MpiWorld::~MpiWorld() {
  for (mpi::Handle communicator : communicators_) library_->free(communicator);
}

std::unique_ptr<Group> MpiWorld::group(uint32_t stream) const {
  return std::make_unique<MpiGroup>(*library_, communicators_.at(stream), world_.size, world_.rank);
}

}  // namespace perseus

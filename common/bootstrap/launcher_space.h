// The few words that the processes of a job can leave for each other with their launcher, before they have any
// connection of their own: MPICH's and Slurm's PMI, Open MPI's and Slurm's PMIx, or MPI. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/identity.h"

namespace perseus {

// PMI and PMIx serve a process once: they may be opened once, and MPI may not be initialised afterwards. All ranks make
// the same calls to fence and finish. Every call throws Error: kIo where the launcher refuses or is gone, kTimeout
// where it does not answer by `deadline_ns`.
class LauncherSpace {
 public:
  // Without finish() the launcher takes the end of this process for a failure, and ends the others.
  virtual ~LauncherSpace() = default;
  // For the others, once all have passed the next fence. Values are of letters and digits, at most most_bytes() long.
  virtual void put(const std::string& key, const std::string& value) = 0;
  virtual size_t most_bytes() const = 0;
  // Waits until every rank is here.
  virtual void fence() = 0;
  // What `rank` has put before the last fence.
  virtual std::string get(int rank, const std::string& key) = 0;
  // No more calls.
  virtual void finish() = 0;
};

struct SpaceOptions {
  Identity identity;
  Environment environment;
  int64_t deadline_ns = 0;  // base/clock.h
  int64_t limit_s = 0;      // what the deadline was made from, for messages
};

// Over the socket PMI_FD, in the text protocol PMI-1 that MPICH's Hydra and Slurm's plugin pmi2 speak.
std::unique_ptr<LauncherSpace> open_pmi_space(const SpaceOptions& options);
// Through the library libpmix.so.2, opened here: that of this process or of its launcher, else any that is found.
std::unique_ptr<LauncherSpace> open_pmix_space(const SpaceOptions& options);
// Through the MPI library of the launcher, which is initialised then and may be used afterwards.
std::unique_ptr<LauncherSpace> open_mpi_space(const SpaceOptions& options);

// For implementations: throws at the deadline. `what` is what was waited for.
void check_patience(const SpaceOptions& options, const std::string& what);

}  // namespace perseus

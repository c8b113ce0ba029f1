// Who am I: the one place that reads rank and world from what a launcher left in the environment.
// Thread-safe: pure functions of the environment they are given.
#pragma once

#include <functional>
#include <string>

namespace perseus {

// The value of a variable, "" = not set.
using Environment = std::function<std::string(const std::string& name)>;

enum class Launcher { kSingle, kPerseusrun, kTorch, kOpenMpi, kMpich, kSlurm };

// A rank's place in its world. local_size 0 or cross_size 0 = the launcher did not say: the context finds out by host.
struct Identity {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;
  int cross_rank = 0, cross_size = 1;
  Launcher launcher = Launcher::kSingle;
};
bool operator==(const Identity& a, const Identity& b);

// "perseusrun", "torch", "openmpi", "mpich", "slurm" or "single": lives as long as the process.
const char* launcher_name(Launcher launcher);

// perseusrun's, torchrun's, Open MPI's, MPICH's or srun's, else that of a single process. Throws
// Error(kInvalidArgument) naming variable and value when one is no number or does not fit the others.
Identity identify(const Environment& environment);

// The value of a variable that has to be a whole number in least..most. Throws Error(kInvalidArgument), opening with
// `component`, naming variable and value.
int64_t whole_number(const char* component, const std::string& name, const std::string& value, int64_t least,
                     int64_t most);

}  // namespace perseus

// One table of launchers and the names of their variables; Slurm alone needs more than names.
#include "bootstrap/identity.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <vector>

#include "base/error.h"

namespace perseus {
namespace {

constexpr int64_t kMostRanks = 1'000'000;

// nullptr = the launcher has no such variable.
struct Source {
  Launcher launcher;
  const char *rank, *size, *local_rank, *local_size, *cross_rank, *cross_size;
};

// In order of precedence: what is started inside an mpirun or srun task knows better than that task.
const Source kSources[] = {
    {Launcher::kPerseusrun, "PERSEUS_RANK", "PERSEUS_SIZE", "PERSEUS_LOCAL_RANK", "PERSEUS_LOCAL_SIZE",
     "PERSEUS_CROSS_RANK", "PERSEUS_CROSS_SIZE"},
    {Launcher::kPerseusrun, "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
     "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"},
    {Launcher::kTorch, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr, nullptr},
    {Launcher::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr, nullptr},
    {Launcher::kMpich, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr, nullptr},
};

[[noreturn]] void refuse(const char* component, const std::string& name, const std::string& value,
                         const std::string& expected) {
  fail(ErrorKind::kInvalidArgument,
       "[" + std::string(component) + "] " + name + "='" + value + "': expected " + expected);
}

// -1 = not a whole number, or a huge one.
int64_t parsed(const std::string& value) {
  const bool digits = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
  return digits && value.size() < 18 ? std::stoll(value) : -1;
}

int number(const Environment& environment, const std::string& name, int least) {
  const std::string value = environment(name);
  const int64_t result = parsed(value);
  if (result < least || result > kMostRanks)
    refuse("identity", name, value, "a whole number, " + std::to_string(least) + " or more");
  return static_cast<int>(result);
}

int index(const Environment& environment, const std::string& name, const std::string& size_name, int size) {
  const int value = number(environment, name, 0);
  if (value >= size)
    refuse("identity", name, environment(name),
           "0.." + std::to_string(size - 1) + " (" + size_name + "=" + std::to_string(size) + ")");
  return value;
}

// Zeros unless both are there: the context then finds out both.
void read_pair(const Environment& environment, const char* index_name, const char* size_name, int limit, int* out,
               int* out_size) {
  *out = *out_size = 0;
  if (index_name == nullptr || environment(index_name).empty() || environment(size_name).empty()) return;
  const int size = number(environment, size_name, 1);
  if (size > limit)
    refuse("identity", size_name, environment(size_name), "at most the world's " + std::to_string(limit) + " ranks");
  *out = index(environment, index_name, size_name, size);
  *out_size = size;
}

Identity from_source(const Environment& environment, const Source& source) {
  Identity identity;
  identity.launcher = source.launcher;
  identity.size = number(environment, source.size, 1);
  identity.rank = index(environment, source.rank, source.size, identity.size);
  read_pair(environment, source.local_rank, source.local_size, identity.size, &identity.local_rank,
            &identity.local_size);
  read_pair(environment, source.cross_rank, source.cross_size, identity.size, &identity.cross_rank,
            &identity.cross_size);
  return identity;
}

// Throws where torchrun was started by one of perseusrun's ranks, whose variables remain. perseusrun takes
// TORCHELASTIC_RUN_ID from its ranks, so it comes from inside.
void check_for_torchrun_inside(const Environment& environment, const Identity& outer, const Source& source) {
  const std::string rank = environment("RANK"), size = environment("WORLD_SIZE");
  if (environment("TORCHELASTIC_RUN_ID").empty() || rank.empty() || size.empty()) return;
  if (rank == std::to_string(outer.rank) && size == std::to_string(outer.size)) return;
  fail(ErrorKind::kInvalidArgument,
       std::string("[identity] ") + source.rank + "=" + std::to_string(outer.rank) + " and " + source.size + "=" +
           std::to_string(outer.size) +
           " belong to an outer job of perseusrun, inside of which torchrun has started this process as rank " + rank +
           " of " + size +
           " (RANK, WORLD_SIZE): start the script with perseusrun or with torchrun alone, or unset PERSEUS_RANK, "
           "PERSEUS_SIZE, HOROVOD_RANK and HOROVOD_SIZE in front of torchrun");
}

// A batch script has SLURM_PROCID and SLURM_NTASKS too, but only srun's tasks belong to a step with a count.
bool is_slurm_task(const Environment& environment) {
  for (const char* name : {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"})
    if (environment(name).empty()) return false;
  return true;
}

// "2(x3),1" -> {2, 2, 2, 1}.
std::vector<int> tasks_per_node(const Environment& environment, const char* name) {
  const std::string value = environment(name);
  std::vector<int> counts;
  std::stringstream stream(value);
  for (std::string part; std::getline(stream, part, ',');) {
    const size_t bracket = part.find("(x");
    const bool repeated = bracket != std::string::npos && part.back() == ')';
    const int64_t count = parsed(part.substr(0, bracket));
    const int64_t repeat = repeated ? parsed(part.substr(bracket + 2, part.size() - bracket - 3)) : 1;
    if (count < 0 || count > kMostRanks || repeat < 0 || static_cast<int64_t>(counts.size()) + repeat > kMostRanks ||
        repeated != (bracket != std::string::npos))
      refuse("identity", name, value, "counts such as 2(x3),1");
    counts.insert(counts.end(), static_cast<size_t>(repeat), static_cast<int>(count));
  }
  return counts;
}

Identity from_slurm(const Environment& environment) {
  constexpr const char* kTasks = "SLURM_STEP_TASKS_PER_NODE";
  Identity identity{0, 1, 0, 0, 0, 0, Launcher::kSlurm};
  identity.size = number(environment, "SLURM_STEP_NUM_TASKS", 1);
  identity.rank = index(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", identity.size);
  for (const char* name : {"SLURM_LOCALID", "SLURM_NODEID", kTasks})
    if (environment(name).empty()) return identity;
  const std::vector<int> counts = tasks_per_node(environment, kTasks);
  const auto node = static_cast<size_t>(number(environment, "SLURM_NODEID", 0));
  const int local_rank = number(environment, "SLURM_LOCALID", 0);
  int64_t total = 0;
  for (const int count : counts) total += count;
  if (total != identity.size || node >= counts.size() || local_rank >= counts[node])
    refuse("identity", kTasks, environment(kTasks),
           std::to_string(identity.size) + " tasks in all and more than " + std::to_string(local_rank) + " on node " +
               std::to_string(node) + " (SLURM_STEP_NUM_TASKS=" + std::to_string(identity.size) +
               ", SLURM_LOCALID=" + std::to_string(local_rank) + ", SLURM_NODEID=" + std::to_string(node) + ")");
  identity.local_rank = local_rank;
  identity.local_size = counts[node];
  const auto owner = [local_rank](int count) { return count > local_rank; };
  identity.cross_rank =
      static_cast<int>(std::count_if(counts.begin(), counts.begin() + static_cast<long>(node), owner));
  identity.cross_size = static_cast<int>(std::count_if(counts.begin(), counts.end(), owner));
  return identity;
}

}  // namespace

int64_t whole_number(const char* component, const std::string& name, const std::string& value, int64_t least,
                     int64_t most) {
  const int64_t result = parsed(value);
  if (result < least || result > most)
    refuse(component, name, value, "a whole number " + std::to_string(least) + ".." + std::to_string(most));
  return result;
}

Identity identify(const Environment& environment) {
  for (const Source& source : kSources) {
    const std::string rank = environment(source.rank), size = environment(source.size);
    if (rank.empty() || size.empty()) {
      // Single variables named RANK are common; nobody sets one of ours for another purpose.
      if (rank.empty() != size.empty() && source.launcher == Launcher::kPerseusrun) {
        const bool rank_given = size.empty();
        fail(ErrorKind::kInvalidArgument, "[identity] " + std::string(rank_given ? source.rank : source.size) + "='" +
                                              (rank_given ? rank : size) + "' without " +
                                              (rank_given ? source.size : source.rank) + ": set both");
      }
      continue;
    }
    // srun's PMI plugins set PMI_RANK in every task, MPI or not; Hydra's mpirun always adds MPI_LOCALRANKID.
    if (source.launcher == Launcher::kMpich && is_slurm_task(environment) && environment("MPI_LOCALRANKID").empty())
      continue;
    const Identity identity = from_source(environment, source);
    if (source.launcher == Launcher::kPerseusrun) check_for_torchrun_inside(environment, identity, source);
    return identity;
  }
  return is_slurm_task(environment) ? from_slurm(environment) : Identity{};
}

}  // namespace perseus

// One table of launchers and the names of their variables; Slurm alone needs more than names.
#include "bootstrap/identity.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <tuple>
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

// The largest number there is for all that are larger; nullopt = not a whole number.
std::optional<int64_t> parsed(const std::string& value) {
  if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  const size_t first = std::min(value.find_first_not_of('0'), value.size() - 1);
  if (value.size() - first > std::numeric_limits<int64_t>::digits10) return std::numeric_limits<int64_t>::max();
  return std::stoll(value.substr(first));
}

int64_t number(const Environment& environment, const std::string& name, int least) {
  const std::string value = environment(name);
  const std::optional<int64_t> result = parsed(value);
  if (!result || *result < least)
    refuse("identity", name, value, "a whole number, " + std::to_string(least) + " or more");
  return *result;
}

int count(const Environment& environment, const std::string& name) {
  const int64_t value = number(environment, name, 1);
  if (value > kMostRanks)
    refuse("identity", name, environment(name), "at most " + std::to_string(kMostRanks) + " ranks");
  return static_cast<int>(value);
}

int index(const Environment& environment, const std::string& name, const std::string& size_name, int size) {
  const int64_t value = number(environment, name, 0);
  if (value >= size)
    refuse("identity", name, environment(name),
           "0.." + std::to_string(size - 1) + " (" + size_name + "=" + std::to_string(size) + ")");
  return static_cast<int>(value);
}

// Zeros unless both are there: the context then finds out both.
void read_pair(const Environment& environment, const char* index_name, const char* size_name, int limit, int* out,
               int* out_size) {
  *out = *out_size = 0;
  if (index_name == nullptr || environment(index_name).empty() || environment(size_name).empty()) return;
  const int64_t size = number(environment, size_name, 1);
  if (size > limit)
    refuse("identity", size_name, environment(size_name), "at most the world's " + std::to_string(limit) + " ranks");
  *out_size = static_cast<int>(size);
  *out = index(environment, index_name, size_name, *out_size);
}

Identity from_source(const Environment& environment, const Source& source) {
  Identity identity;
  identity.launcher = source.launcher;
  identity.size = count(environment, source.size);
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

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(' '), end = text.find_last_not_of(' ');
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

// "2(x3),1" -> {2, 2, 2, 1}.
std::vector<int> tasks_per_node(const Environment& environment, const char* name) {
  const std::string value = environment(name);
  std::vector<int> counts;
  std::stringstream stream(value);
  for (std::string part; std::getline(stream, part, ',');) {
    part = trimmed(part);
    const size_t bracket = part.find("(x");
    const bool repeated = bracket != std::string::npos && part.back() == ')';
    const std::optional<int64_t> tasks = parsed(part.substr(0, bracket));
    const std::optional<int64_t> nodes = repeated ? parsed(part.substr(bracket + 2, part.size() - bracket - 3)) : 1;
    if (!tasks || !nodes || *tasks > kMostRanks || *nodes > kMostRanks - static_cast<int64_t>(counts.size()) ||
        repeated != (bracket != std::string::npos))
      refuse("identity", name, value, "counts such as 2(x3),1");
    counts.insert(counts.end(), static_cast<size_t>(*nodes), static_cast<int>(*tasks));
  }
  return counts;
}

Identity from_slurm(const Environment& environment) {
  constexpr const char* kTasks = "SLURM_STEP_TASKS_PER_NODE";
  Identity identity{0, 1, 0, 0, 0, 0, Launcher::kSlurm};
  identity.size = count(environment, "SLURM_STEP_NUM_TASKS");
  identity.rank = index(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", identity.size);
  for (const char* name : {"SLURM_LOCALID", "SLURM_NODEID", kTasks})
    if (environment(name).empty()) return identity;
  const std::vector<int> counts = tasks_per_node(environment, kTasks);
  const auto node = static_cast<size_t>(number(environment, "SLURM_NODEID", 0));
  const int64_t local_rank = number(environment, "SLURM_LOCALID", 0);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (total != identity.size || node >= counts.size() || local_rank >= counts[node])
    refuse("identity", kTasks, environment(kTasks),
           std::to_string(identity.size) + " tasks in all and more than " + std::to_string(local_rank) + " on node " +
               std::to_string(node) + " (SLURM_STEP_NUM_TASKS=" + std::to_string(identity.size) +
               ", SLURM_LOCALID=" + std::to_string(local_rank) + ", SLURM_NODEID=" + std::to_string(node) + ")");
  identity.local_rank = static_cast<int>(local_rank);
  identity.local_size = counts[node];
  const auto owner = [local_rank](int tasks) { return tasks > local_rank; };
  identity.cross_rank =
      static_cast<int>(std::count_if(counts.begin(), counts.begin() + static_cast<long>(node), owner));
  identity.cross_size = static_cast<int>(std::count_if(counts.begin(), counts.end(), owner));
  return identity;
}

}  // namespace

bool operator==(const Identity& a, const Identity& b) {
  return std::tie(a.rank, a.size, a.local_rank, a.local_size, a.cross_rank, a.cross_size, a.launcher) ==
         std::tie(b.rank, b.size, b.local_rank, b.local_size, b.cross_rank, b.cross_size, b.launcher);
}

const char* launcher_name(Launcher launcher) {
  switch (launcher) {
    case Launcher::kPerseusrun:
      return "perseusrun";
    case Launcher::kTorch:
      return "torch";
    case Launcher::kOpenMpi:
      return "openmpi";
    case Launcher::kMpich:
      return "mpich";
    case Launcher::kSlurm:
      return "slurm";
    case Launcher::kSingle:
      break;
  }
  return "single";
}

int64_t whole_number(const char* component, const std::string& name, const std::string& value, int64_t least,
                     int64_t most) {
  const std::optional<int64_t> result = parsed(value);
  if (!result || *result < least || *result > most)
    refuse(component, name, value, "a whole number " + std::to_string(least) + ".." + std::to_string(most));
  return *result;
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

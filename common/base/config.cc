// The table of variables and the parser that gives every one of them the same rules.
#include "base/config.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>

#include "base/error.h"

namespace perseus {
namespace {

const Variable kTable[] = {
    {Var::kStreams, "PERSEUS_ALLREDUCE_STREAMS", "TIACC_TRAINING_NUM_NCCL_STREAMS,HOROVOD_NUM_NCCL_STREAMS",
     VarType::kInt, "4", "1..12", true,
     "Most buckets in flight at once, each on connections of its own. Up to 8 pays on links of 32 Gbit/s and more. "
     "When it is not given, the tuner also tries half and twice as many (HOROVOD_AUTOTUNE)."},
    {Var::kFusionThreshold, "HOROVOD_FUSION_THRESHOLD", "TIACC_TRAINING_FUSION_THRESHOLD", VarType::kInt, "134217728",
     "0..1099511627776", true,
     "Bytes: tensors that become ready together are fused into buckets of at most this size. 0 = no fusion."},
    {Var::kFusionParts, "PERSEUS_ALLREDUCE_FUSION", "", VarType::kInt, "0", "0..128", true,
     "N: buckets of one N-th of the bytes of all gradients of a step, from the second step on: 1 = all that is ready "
     "together, large values = small buckets. HOROVOD_FUSION_THRESHOLD limits them where it is given, too. 0 = the "
     "tuner decides."},
    {Var::kStreamTuningDisable, "PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING", "", VarType::kBool, "0", "", true,
     "1 = the tuner tries no other number of streams."},
    {Var::kAutotune, "HOROVOD_AUTOTUNE", "", VarType::kChoice, "auto", "auto|0|1", true,
     "In the first steps a few bucket sizes and numbers of streams are tried, where they were not given, and the best "
     "are kept: 0 = never, 1 = always, auto = between hosts, for gradients of at least 4 MiB. Results do not depend on "
     "it."},
    {Var::kAutotuneLog, "HOROVOD_AUTOTUNE_LOG", "PERSEUS_AUTOTUNE_LOG", VarType::kString, "", "", false,
     "File into which rank 0 writes what the tuner tried and chose, as CSV."},
    {Var::kTunerReplay, "PERSEUS_TUNER_REPLAY", "", VarType::kString, "", "", false,
     "File that HOROVOD_AUTOTUNE_LOG wrote, on every host: what it chose is used from the start, and nothing is "
     "tried."},
    {Var::kNcclEnable, "PERSEUS_NCCL_ENABLE", "", VarType::kBool, "0", "", false,
     "1 = use two kinds of link at once. Here links are used at once when they are named in "
     "PERSEUS_GLOO_NETWORK_INTERFACE, separated by commas; this variable alone changes nothing, and rank 0 says so."},
    {Var::kAllreduceDtype, "PERSEUS_ALLREDUCE_DTYPE", "", VarType::kChoice, "auto", "auto|0|1|2", true,
     "What float32 gradients look like on their way: 0 = float16 inside a host and between hosts, 1 = as they are, 2 = "
     "as they are inside a host and float16 between hosts. auto = 2. With AMP, or for exactly the bits of full "
     "precision, use 1."},
    {Var::kAllreduceCodec, "PERSEUS_ALLREDUCE_CODEC", "", VarType::kChoice, "dtype", "dtype|int8|auto", true,
     "How float32 gradients travel between hosts: dtype = as PERSEUS_ALLREDUCE_DTYPE says, int8 = one byte an element, "
     "auto = as they are, as float16, int8 or top-k (LIGHT_TOPK_*), whichever the measured links make fastest; what "
     "int8 and top-k leave out is added to the next gradient."},
    {Var::kLinkGbit, "PERSEUS_LINK_GBIT", "", VarType::kFloat, "0", "0..1000000", true,
     "Speed of the links between hosts in Gbit/s that auto reckons with, for choices that are the same in every run. 0 "
     "= measured when the first gradient is sent."},
    {Var::kGradientScale, "PERSEUS_ALLREDUCE_GRADIENT_SCALE", "", VarType::kFloat, "0", "0..1000000000000", true,
     "Multiplied in before gradients become float16 and divided out after. 0 = a power of two for every 16384 "
     "elements, so that none overflows. With a value of your own, first losses that are very large and NaN ask for a "
     "smaller one."},
    {Var::kTopK, "LIGHT_TOPK_ALLREDUCE", "", VarType::kBool, "0", "", true,
     "1 = only the largest elements of a gradient travel between hosts, the rest is kept and added to the next one."},
    {Var::kTopKRatio, "LIGHT_TOPK_RATIO", "", VarType::kFloat, "0.01", "0.000001..1", true,
     "The fraction of elements that LIGHT_TOPK_ALLREDUCE sends."},
    {Var::kTopKThreshold, "LIGHT_TOPK_THRESHOLD", "", VarType::kInt, "1048576", "0..1099511627776", true,
     "Bytes: smaller gradients are sent whole (LIGHT_TOPK_ALLREDUCE)."},
    {Var::kTopKHalf, "LIGHT_TOPK_FP16", "", VarType::kBool, "0", "", true,
     "1 = the elements that LIGHT_TOPK_ALLREDUCE sends travel as float16."},
    {Var::kDownsample, "PERSEUS_DOWNSAMPLE_N_ELEMENTS", "", VarType::kInt, "1", "1..1024", true,
     "N: every step another N-th of each gradient's elements travels between hosts, the rest is kept and added to the "
     "next one: 1/N of the traffic. 2, 4 and 8 are usual, 1 = off."},
    {Var::kGradientMomentum, "PERSEUS_GRADIENT_MOMENTUM", "", VarType::kFloat, "1", "0..1", true,
     "What is kept by PERSEUS_DOWNSAMPLE_N_ELEMENTS is multiplied by this every step: 1 loses nothing, less discounts "
     "what is old."},
    {Var::kChangeAllgather, "PERSEUS_CHANGE_HVD_ALLGATHER", "", VarType::kChoice, "auto", "auto|0|1", true,
     "What allgather makes of the tensors of all ranks: 0 = stacks them, so that all must be of one shape and the "
     "result has one dimension more, 1 = joins them along the first dimension, auto = as the interface that is used "
     "does: Horovod's joins. What Perseus gathers for itself does not depend on it."},
    {Var::kAllreduceMode, "PERSEUS_ALLREDUCE_MODE", "HOROVOD_HIERARCHICAL_ALLREDUCE", VarType::kChoice, "auto",
     "auto|0|1", true,
     "How allreduce uses hosts of several ranks: 0 = all ranks alike (within one host gradients stay exact), 1 = one "
     "rank of each host speaks for it, auto = every rank carries a part of the data between the hosts (2D)."},
    {Var::kTwoD, "LIGHT_2D_ALLREDUCE", "HOROVOD_TORUS_ALLREDUCE", VarType::kChoice, "auto", "auto|0|1", true,
     "1 = reduce inside groups of LIGHT_INTRA_SIZE ranks of a host, then across the groups, 0 = all ranks alike, auto "
     "= as PERSEUS_ALLREDUCE_MODE says."},
    {Var::kAllreduceAlgorithm, "PERSEUS_ALLREDUCE_ALGORITHM", "", VarType::kChoice, "auto",
     "auto|pairwise|halving_doubling|ring|recursive_doubling", true,
     "How exact allreduces go between hosts, or between all ranks where PERSEUS_ALLREDUCE_MODE says that they are "
     "alike. auto = by cost: pairwise, or halving_doubling (recursive_doubling for small ones) where there are many "
     "hosts (5 at least) for few bytes."},
    {Var::kIntraSize, "LIGHT_INTRA_SIZE", "", VarType::kInt, "8", "1..1000000", true,
     "Ranks of an inner group when LIGHT_2D_ALLREDUCE is 1."},
    {Var::kHierarchicalThreshold, "LIGHT_HIERARCHICAL_THRESHOLD", "", VarType::kInt, "1073741824", "0..1099511627776",
     true, "Bytes: larger tensors, encoded or not, are reduced among all ranks alike."},
    {Var::kCycleTime, "HOROVOD_CYCLE_TIME", "", VarType::kFloat, "0", "0..10000", false,
     "Milliseconds to wait between negotiation rounds, so that more tensors share one. Perseus is event driven: "
     "0 (no pause) is right unless the processor is very busy."},
    {Var::kTimeout, "GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS", VarType::kInt, "60", "0..1000000", false,
     "Seconds without a sign of life after which a rank counts as dead, and without a byte after which an operation "
     "under way fails. A rank that is alive but late is waited for. 0 = off."},
    {Var::kStartTimeout, "HOROVOD_START_TIMEOUT", "PERSEUS_START_TIMEOUT", VarType::kInt, "60", "1..1000000", false,
     "Seconds that init() waits for all ranks to appear."},
    {Var::kStallCheckDisable, "HOROVOD_STALL_CHECK_DISABLE", "", VarType::kBool, "0", "", false,
     "1 = no warning about tensors that only some ranks have submitted, and deadlocks are not looked for."},
    {Var::kStallCheckTime, "HOROVOD_STALL_CHECK_TIME_SECONDS", "", VarType::kInt, "60", "1..1000000", false,
     "Age in seconds at which a tensor that only some ranks have submitted is reported with the missing ranks, and for "
     "which all ranks must have waited for each other before that is an error."},
    {Var::kStallShutdownTime, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "", VarType::kInt, "0", "0..1000000", false,
     "Age in seconds at which a tensor that only some ranks have submitted ends the job. 0 = never."},
    {Var::kInterfaces, "PERSEUS_GLOO_NETWORK_INTERFACE",
     "PERSEUS_NCCL_NETWORK_INTERFACE,HOROVOD_GLOO_IFACE,GLOO_SOCKET_IFNAME,NCCL_SOCKET_IFNAME", VarType::kString, "",
     "", false,
     "Network interfaces for data between hosts, separated by commas; all of them are used at once. Unset = chosen "
     "automatically. NCCL_SOCKET_IFNAME alone has NCCL's syntax: eth = every interface whose name begins so, =eth0 = "
     "that one, ^docker,lo = what is not to be chosen."},
    {Var::kTransport, "PERSEUS_TRANSPORT", "", VarType::kChoice, "auto", "auto|shm|tcp", true,
     "How ranks exchange data: auto = shared memory inside a host and TCP between hosts; shm or tcp forces one."},
    {Var::kSpin, "PERSEUS_SPIN_US", "", VarType::kInt, "-1", "-1..1000000", false,
     "Microseconds a blocked caller looks for news before it sleeps. -1 = 200 while the ranks of this host have a core "
     "each, else 0."},
    {Var::kSimd, "PERSEUS_SIMD", "", VarType::kChoice, "auto", "auto|avx512|avx2|neon|portable", false,
     "Instruction set of the kernels; every one gives the same bits. auto = the best this processor has."},
    {Var::kMasterPort, "PERSEUS_MASTER_PORT", "", VarType::kInt, "6666", "1..65535", false,
     "Port of the rendezvous server when rank 0 runs it; the next free one is taken when it is busy."},
    {Var::kUseDdpLauncher, "PERSEUS_USE_DDP_LAUNCHER", "", VarType::kBool, "1", "", false,
     "Once said whether ranks are those of torch's launcher (1) or of mpirun and perseusrun (0). It changes nothing "
     "and need not be set: ranks are known by the variables of whichever launcher started them (docs/launching.md)."},
    {Var::kSecretFile, "PERSEUS_SECRET_FILE", "", VarType::kString, "", "", false,
     "File with the job's secret, readable by its owner only. Unset = made by the launcher or by rank 0."},
    {Var::kFlightRecorder, "PERSEUS_FLIGHT_RECORDER", "TMPDIR", VarType::kString, "/tmp", "", false,
     "Directory into which every rank writes its last 256 operations when the job fails, for finding out why. "
     "Of a user's files there the newest 16 are kept, or four for each rank. off = nowhere."},
    {Var::kTimeline, "HOROVOD_TIMELINE", "", VarType::kString, "", "", false,
     "File into which rank 0 writes a Chrome trace of every operation from init() on; it opens in Perfetto at any "
     "time. DYNAMIC = only between start_timeline() and stop_timeline(), which need this variable."},
    {Var::kTimelineMarkCycles, "HOROVOD_TIMELINE_MARK_CYCLES", "", VarType::kBool, "0", "", false,
     "1 = marks in the timeline where negotiation rounds begin."},
    {Var::kTimelineAllRanks, "PERSEUS_TIMELINE_ALL_RANKS", "", VarType::kBool, "0", "", false,
     "1 = every rank writes a timeline, with its number before the file's suffix: trace.json of rank 0, "
     "trace.rank1.json of rank 1, for perseus-report."},
    {Var::kAccumulateSteps, "PERSEUS_ACCUMULATE_N_STEPS", "", VarType::kInt, "1", "1..1000000", true,
     "Steps whose gradients are added up on each rank before the sum is averaged over the ranks and the optimizer "
     "takes one step: 1/N of the traffic. The batch is N times as large, so adapt the learning rate."},
    {Var::kOfflineNegotiation, "PERSEUS_OFFLINE_NEG", "", VarType::kBool, "0", "", true,
     "1 = learn the order of named allreduces during the first steps, then run without negotiation: only data is sent "
     "until a rank does something else."},
    {Var::kNanCheck, "PERSEUS_ALLREDUCE_NANCHECK", "PERSEUS_ALLREDUCE_NANHECK", VarType::kBool, "0", "", true,
     "1 = look for NaN in every gradient that is sent. All ranks learn tensor and rank before the optimizer's step."},
    {Var::kNanAction, "PERSEUS_ALLREDUCE_NANCHECK_ACTION", "", VarType::kChoice, "report", "report|raise|skip", true,
     "What follows a NaN that was found: report = a warning on every rank, raise = an error on every rank, skip = the "
     "warning, and no rank takes the optimizer's step."},
    {Var::kPerfCheckSteps, "PERSEUS_PERF_CHECK_N_STEPS", "", VarType::kInt, "0", "0..1000000000", true,
     "Every so many steps the ranks compare the time they compute, without what they wait for each other, and slow "
     "ones are named on rank 0. 100 is a good value, 0 = off."},
    {Var::kParameterCheckSteps, "PERSEUS_PARAMETER_CHECK_N_STEPS", "", VarType::kInt, "0", "0..1000000000", true,
     "Every so many steps the ranks compare their parameters, bit by bit. A difference is an error on every rank that "
     "names the first parameter that differs, and its ranks. 100 is a good value, 0 = off."},
    {Var::kLogLevel, "PERSEUS_LOG_LEVEL", "HOROVOD_LOG_LEVEL", VarType::kChoice, "warning",
     "trace|debug|info|warning|error|fatal", false, "Least severe message that is written to standard error."},
    {Var::kLogHideTime, "HOROVOD_LOG_HIDE_TIME", "", VarType::kBool, "0", "", false,
     "1 = no time in front of log lines."},
};
static_assert(sizeof(kTable) / sizeof(kTable[0]) == static_cast<size_t>(Var::kCount), "one line per variable");

std::string lower_case(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// The name and its aliases.
std::vector<std::string> names_of(const Variable& entry) {
  std::vector<std::string> names = split(entry.aliases, ',');
  names.insert(names.begin(), entry.name);
  return names;
}

// Letters to insert, remove or replace to make one of the other (Levenshtein 1966).
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& expected) {
  fail(ErrorKind::kInvalidArgument, "[config] " + name + "='" + value + "': expected " + expected);
}

double parse_number(const Variable& variable, const std::string& name, const std::string& value, bool whole) {
  const char* what = whole ? "a whole number" : "a number";
  const std::string range = std::string(what) + " " + variable.allowed;
  errno = 0;
  char* end = nullptr;
  const double number =
      whole ? static_cast<double>(std::strtoll(value.c_str(), &end, 10)) : std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || errno != 0) refuse(name, value, range);
  const std::string allowed = variable.allowed;
  const size_t dots = allowed.find("..");
  if (!(number >= std::atof(allowed.substr(0, dots).c_str()) && number <= std::atof(allowed.substr(dots + 2).c_str())))
    refuse(name, value, range);
  return number;
}

}  // namespace

std::string environment_value(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

std::vector<std::string> misspelt_variables() {
  // So that PERSEUS_SIZE, of a launcher, is not taken for PERSEUS_SIMD.
  constexpr size_t kLettersForOneWrong = 8;
  constexpr const char* kPrefixes[] = {"PERSEUS_", "HOROVOD_", "LIGHT_", "TIACC_"};
  std::vector<std::string> known, found;
  for (const Variable& entry : kTable)
    for (const std::string& name : names_of(entry)) known.push_back(name);
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    const auto begins = [&](const std::string& prefix) { return name.compare(0, prefix.size(), prefix) == 0; };
    if (std::none_of(std::begin(kPrefixes), std::end(kPrefixes), begins)) continue;
    const auto nearer = [&](const auto& a, const auto& b) { return distance(name, a) < distance(name, b); };
    const std::string& meant = *std::min_element(known.begin(), known.end(), nearer);
    const size_t wrong = distance(name, meant);
    if (wrong > 0 && wrong <= name.size() / kLettersForOneWrong)
      found.push_back(name + " is no variable: is " + meant + " meant?");
  }
  return found;
}

const Variable& variable(Var id) { return kTable[static_cast<int>(id)]; }

const char* var_type_name(VarType type) {
  constexpr const char* kNames[] = {"int", "float", "bool", "string", "choice"};
  return kNames[static_cast<int>(type)];
}

Config::Config(const std::vector<std::string>& overrides) {
  for (const Variable& entry : kTable) {
    std::string source = entry.name;
    std::string value = entry.default_value;
    const std::vector<std::string> names = names_of(entry);
    const auto overridden = [&](const std::string& name) -> const char* {
      for (const std::string& text : overrides)
        if (text.compare(0, name.size() + 1, name + "=") == 0) return text.c_str() + name.size() + 1;
      return nullptr;
    };
    const auto take_first = [&](auto look_up) {
      for (const std::string& name : names)
        if (const char* found = look_up(name); found != nullptr && *found != '\0') {
          source = name;
          value = found;
          return true;
        }
      return false;
    };
    given_[static_cast<int>(entry.id)] =
        take_first(overridden) || take_first([](const std::string& name) { return std::getenv(name.c_str()); });
    parse(entry, source, value);
  }
}

void Config::parse(const Variable& entry, const std::string& source_name, const std::string& value) {
  const int i = static_cast<int>(entry.id);
  text_[i] = value;
  source_[i] = source_name;
  // Horovod's users write DEBUG as well as debug.
  const std::string small = lower_case(value);
  switch (entry.type) {
    case VarType::kInt:
      number_[i] = parse_number(entry, source_name, value, true);
      integer_[i] = static_cast<int64_t>(number_[i]);
      break;
    case VarType::kFloat:
      number_[i] = parse_number(entry, source_name, value, false);
      break;
    case VarType::kBool:
      // Horovod reads strtol(value) > 0, under which "true" is false; here it is what it says.
      if (small == "1" || small == "true" || small == "on" || small == "yes") integer_[i] = 1;
      else if (small == "0" || small == "false" || small == "off" || small == "no") integer_[i] = 0;
      else refuse(source_name, value, "0 or 1");
      break;
    case VarType::kChoice: {
      const std::vector<std::string> choices = split(entry.allowed, '|');
      for (size_t c = 0; c < choices.size(); ++c)
        if (choices[c] == small) {
          integer_[i] = static_cast<int64_t>(c);
          text_[i] = small;
          return;
        }
      refuse(source_name, value, std::string("one of ") + entry.allowed);
    }
    case VarType::kString:
      break;
  }
}

}  // namespace perseus

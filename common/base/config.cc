// The table of variables and the parser that gives every one of them the same rules.
#include "base/config.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>
#include <string_view>

#include "base/error.h"
#include "base/mutex.h"
#include "base/plain_numbers.h"

namespace perseus {
namespace {

constexpr Variable kTable[] = {
    {Var::kStreams, "PERSEUS_ALLREDUCE_STREAMS", "TIACC_TRAINING_NUM_NCCL_STREAMS,HOROVOD_NUM_NCCL_STREAMS",
     VarType::kInt, "4", "1..12", true,
     "How many buckets may be in flight at once, each on connections of its own. Up to 8 pays off on links of 32 "
     "Gbit/s and more. If it is unset, the tuner also tries half and twice as many (HOROVOD_AUTOTUNE)."},
    {Var::kFusionThreshold, "HOROVOD_FUSION_THRESHOLD", "TIACC_TRAINING_FUSION_THRESHOLD", VarType::kInt, "134217728",
     "0..1099511627776", true,
     "Largest size of a bucket in bytes: Perseus fuses tensors that become ready together into buckets. 0 = no "
     "fusion."},
    {Var::kFusionParts, "PERSEUS_ALLREDUCE_FUSION", "", VarType::kInt, "0", "0..128", true,
     "N: from the second step on, a bucket has one N-th of the bytes of all gradients of a step. 1 = one bucket for "
     "all that is ready together, large values = small buckets. HOROVOD_FUSION_THRESHOLD also limits them if it is "
     "set. 0 = the tuner decides."},
    {Var::kStreamTuningDisable, "PERSEUS_ALLREDUCE_DISABLE_STREAM_TUNING", "", VarType::kBool, "0", "", true,
     "1 = the tuner does not try other numbers of streams."},
    {Var::kAutotune, "HOROVOD_AUTOTUNE", "", VarType::kChoice, "auto", "auto|0|1", true,
     "In the first steps the tuner tries a few bucket sizes and numbers of streams, unless they are set, and keeps "
     "the best: 0 = never, 1 = always, auto = between hosts, for gradients of at least 4 MiB. Results do not depend "
     "on it, except where it tries NCCL (see PERSEUS_GPU_OPERATIONS)."},
    {Var::kAutotuneLog, "HOROVOD_AUTOTUNE_LOG", "PERSEUS_AUTOTUNE_LOG", VarType::kString, "", "", false,
     "File into which rank 0 writes what the tuner tried and chose, as CSV."},
    {Var::kTunerReplay, "PERSEUS_TUNER_REPLAY", "", VarType::kString, "", "", false,
     "File that HOROVOD_AUTOTUNE_LOG wrote, on every host: Perseus uses its choice from the start, and the tuner "
     "tries nothing."},
    {Var::kNcclEnable, "PERSEUS_NCCL_ENABLE", "", VarType::kBool, "0", "", false,
     "1 = use two kinds of link at once: the tuner divides gradients on GPUs between NCCL and Perseus' own exchange "
     "by their measured speeds. On CPUs it has no effect, and rank 0 says so: there, Perseus uses several links at "
     "once if PERSEUS_GLOO_NETWORK_INTERFACE names them, separated by commas."},
    {Var::kAllreduceDtype, "PERSEUS_ALLREDUCE_DTYPE", "", VarType::kChoice, "auto", "auto|0|1|2", true,
     "How float32 gradients travel: 0 = as float16 inside a host and between hosts, 1 = unchanged, 2 = unchanged "
     "inside a host and as float16 between hosts. auto = 2. To get exactly the bits of full precision, use 1."},
    {Var::kAllreduceCodec, "PERSEUS_ALLREDUCE_CODEC", "", VarType::kChoice, "dtype",
     "dtype|int8|int4|int2|powersgd|lossless|auto", true,
     "How float32 gradients travel between hosts: dtype = as PERSEUS_ALLREDUCE_DTYPE says, int8, int4, int2 = so many "
     "bits per element, powersgd = as products of narrow matrices (PERSEUS_POWERSGD_RANK), lossless = with every bit, "
     "in about 6/7 of the bytes, and unchanged inside a host, auto = unchanged, as float16, int8, int4 or int2, "
     "whichever the measured links make fastest; int4 and int2 only for SGD, since with other optimizers training "
     "may end with a higher loss, of which a warning tells: see docs/accuracy.md. What int8, int4, int2 and powersgd "
     "leave out is added to the next gradient; float16 only rounds."},
    {Var::kLinkGbit, "PERSEUS_LINK_GBIT", "", VarType::kFloat, "0", "0..1000000", true,
     "Speed of the links between hosts in Gbit/s that auto assumes, of all interfaces together. Latencies and the "
     "speeds of codecs are measured all the same, so where two codecs take almost the same time, its choice may "
     "differ from run to run. 0 = Perseus measures the speed when the first gradient is sent, and again as "
     "PERSEUS_LINK_CHECK_SECONDS says."},
    {Var::kLinkCheck, "PERSEUS_LINK_CHECK_SECONDS", "", VarType::kInt, "60", "0..1000000", true,
     "After so many seconds auto measures the links between hosts again, for about 0.1 s, and chooses codecs anew if "
     "they have become faster or slower by half. 0 = never."},
    {Var::kGradientScale, "PERSEUS_ALLREDUCE_GRADIENT_SCALE", "", VarType::kFloat, "0", "0..1000000000000", true,
     "Factor by which gradients are multiplied before they become float16, and divided afterwards. 0 = a power of two "
     "for every 16384 elements, so that none overflows. If you set a value and the first losses are very large or "
     "NaN, use a smaller one."},
    {Var::kTopK, "LIGHT_TOPK_ALLREDUCE", "", VarType::kBool, "0", "", true,
     "1 = only the largest elements of a gradient travel between hosts; the rest is kept and added to the next "
     "gradient."},
    {Var::kTopKRatio, "LIGHT_TOPK_RATIO", "", VarType::kFloat, "0.01", "0.000001..1", true,
     "Fraction of the elements that LIGHT_TOPK_ALLREDUCE sends. Training may end with a higher loss than with exact "
     "gradients, the more so the smaller the fraction, and a warning says so: see docs/accuracy.md."},
    {Var::kTopKThreshold, "LIGHT_TOPK_THRESHOLD", "", VarType::kInt, "1048576", "0..1099511627776", true,
     "Size in bytes below which LIGHT_TOPK_ALLREDUCE sends gradients whole: as PERSEUS_ALLREDUCE_DTYPE says, and "
     "below 8 KiB unchanged. With `Compression.topk` in the script, gradients below 8 KiB are sent whole, or below "
     "this size if it is smaller."},
    {Var::kTopKHalf, "LIGHT_TOPK_FP16", "", VarType::kBool, "0", "", true,
     "1 = the elements that LIGHT_TOPK_ALLREDUCE sends travel as float16."},
    {Var::kTopKWarmUp, "LIGHT_TOPK_WARMUP_STEPS", "", VarType::kInt, "100", "0..1000000000", true,
     "Steps in which the fraction of the elements that are sent falls from 0.25 to LIGHT_TOPK_RATIO, or to the "
     "fraction that a script asks for, if that is below 0.05: gradients change fastest at first. 0 = none."},
    {Var::kTopKMomentum, "LIGHT_TOPK_MOMENTUM_CORRECTION", "", VarType::kChoice, "0", "0|1|masking", true,
     "1 = top-k holds back what the optimizer's momentum makes of a gradient instead of the gradient, so that waiting "
     "costs less. masking = the momentum of what is sent also begins anew (Deep Gradient Compression). Both act for "
     "torch.optim.SGD with momentum, but not Nesterov's, in perseus.torch.DistributedOptimizer. 0 = neither."},
    {Var::kPowerSgdRank, "PERSEUS_POWERSGD_RANK", "", VarType::kInt, "4", "1..1024", true,
     "The rank r of the matrices that PowerSGD sends: r (n + m) numbers instead of n m for a gradient with n rows and "
     "m columns. Gradients that this would not halve travel as PERSEUS_ALLREDUCE_DTYPE says. Training may end with a "
     "higher loss than with exact gradients, and a warning says so: see docs/accuracy.md."},
    {Var::kPowerSgdWarmUp, "PERSEUS_POWERSGD_WARMUP_STEPS", "", VarType::kInt, "100", "0..1000000000", true,
     "Steps in which gradients travel as PERSEUS_ALLREDUCE_DTYPE says before PowerSGD begins: gradients change fastest "
     "at first. 0 = none."},
    {Var::kDownsample, "PERSEUS_DOWNSAMPLE_N_ELEMENTS", "", VarType::kInt, "1", "1..1024", true,
     "N: every host steps with its own gradients, and in every step another N-th of each parameter is averaged, which "
     "is 1/N of the traffic. synchronize_parameters() makes parameters equal; Caffe does so itself, before tests and "
     "snapshots and at the end. Training may end with a higher loss than with exact gradients, the more so the larger "
     "N, and a warning says so: see docs/accuracy.md. 2, 4 and 8 are usual, 1 = off."},
    {Var::kGradientMomentum, "PERSEUS_GRADIENT_MOMENTUM", "", VarType::kFloat, "1", "0..1", true,
     "Factor by which the elements that allreduce(…, compression=Compression.rotate(n)) keeps are multiplied in every "
     "step: 1 loses nothing, a smaller factor discounts old values. Optimizers average parameters instead, and keep "
     "none."},
    {Var::kChangeAllgather, "PERSEUS_CHANGE_HVD_ALLGATHER", "", VarType::kChoice, "auto", "auto|0|1", true,
     "How allgather combines the tensors of all ranks: 0 = it stacks them, so that all must have one shape and the "
     "result has one more dimension, 1 = it joins them along the first dimension, auto = as in the interface that the "
     "script uses; Horovod's joins. The allgathers that Perseus needs for itself do not depend on it."},
    {Var::kAllreduceMode, "PERSEUS_ALLREDUCE_MODE", "HOROVOD_HIERARCHICAL_ALLREDUCE", VarType::kChoice, "auto",
     "auto|0|1", true,
     "How allreduce uses hosts with several ranks: 0 = it treats all ranks alike (within one host gradients stay "
     "exact), 1 = one rank of each host exchanges its data with the other hosts, auto = every rank carries a part of "
     "the data between the hosts (2D)."},
    {Var::kTwoD, "LIGHT_2D_ALLREDUCE", "HOROVOD_TORUS_ALLREDUCE", VarType::kChoice, "auto", "auto|0|1", true,
     "1 = reduce inside groups of LIGHT_INTRA_SIZE ranks of a host, then across the groups, 0 = treat all ranks "
     "alike, auto = as PERSEUS_ALLREDUCE_MODE says."},
    {Var::kAllreduceAlgorithm, "PERSEUS_ALLREDUCE_ALGORITHM", "", VarType::kChoice, "auto",
     "auto|pairwise|halving_doubling|ring|recursive_doubling", true,
     "Algorithm of exact allreduces between hosts, or between all ranks if PERSEUS_ALLREDUCE_MODE treats them alike. "
     "auto = by cost: pairwise, or halving_doubling (recursive_doubling for small tensors) with many hosts (at least "
     "5) and few bytes."},
    {Var::kIntraSize, "LIGHT_INTRA_SIZE", "", VarType::kInt, "8", "1..1000000", true,
     "Number of ranks in an inner group if LIGHT_2D_ALLREDUCE is 1."},
    {Var::kHierarchicalThreshold, "LIGHT_HIERARCHICAL_THRESHOLD", "", VarType::kInt, "1073741824", "0..1099511627776",
     true, "Size in bytes above which a tensor, compressed or not, is reduced among all ranks alike."},
    {Var::kCycleTime, "HOROVOD_CYCLE_TIME", "", VarType::kFloat, "0", "0..10000", false,
     "Milliseconds to wait between negotiation rounds, so that more tensors share a round. Perseus is event-driven: 0 "
     "(no pause) is right unless the processor is very busy."},
    {Var::kTimeout, "GLOO_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS", VarType::kInt, "60", "0..1000000", false,
     "Seconds without a heartbeat after which a rank counts as dead, and without a byte after which an operation "
     "under way fails. Perseus waits for a rank that is alive but late. 0 = off."},
    {Var::kStartTimeout, "HOROVOD_START_TIMEOUT", "PERSEUS_START_TIMEOUT", VarType::kInt, "60", "1..1000000", false,
     "Seconds that init() waits for all ranks to appear."},
    {Var::kStallCheckDisable, "HOROVOD_STALL_CHECK_DISABLE", "", VarType::kBool, "0", "", false,
     "1 = Perseus neither warns of tensors that only some ranks have submitted, nor looks for deadlocks."},
    {Var::kStallCheckTime, "HOROVOD_STALL_CHECK_TIME_SECONDS", "", VarType::kInt, "60", "1..1000000", false,
     "Age in seconds at which Perseus reports a tensor that only some ranks have submitted, with the missing ranks. "
     "If all ranks have waited for each other for this long, that is an error."},
    {Var::kStallShutdownTime, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "", VarType::kInt, "0", "0..1000000", false,
     "Age in seconds at which a tensor that only some ranks have submitted ends the job. 0 = never."},
    {Var::kInterfaces, "PERSEUS_GLOO_NETWORK_INTERFACE",
     "PERSEUS_NCCL_NETWORK_INTERFACE,HOROVOD_GLOO_IFACE,GLOO_SOCKET_IFNAME,NCCL_SOCKET_IFNAME", VarType::kString, "",
     "", false,
     "Network interfaces for data between hosts, separated by commas; Perseus uses all of them at once, if "
     "PERSEUS_ALLREDUCE_STREAMS is at least their number. Unset = chosen automatically. Only NCCL_SOCKET_IFNAME has "
     "NCCL's syntax: eth = every interface whose name begins so, "
     "=eth0 = that interface alone, ^docker,lo = all others."},
    {Var::kTransport, "PERSEUS_TRANSPORT", "", VarType::kChoice, "auto", "auto|shm|tcp", true,
     "How ranks exchange data: auto = shared memory inside a host and TCP between hosts; shm or tcp = only this one."},
    {Var::kChecksum, "PERSEUS_CHECKSUM", "", VarType::kBool, "0", "", true,
     "1 = data over TCP carry checksums (CRC32C), so that a byte that a network card, a switch or memory "
     "changes is reported as an error instead of becoming a wrong gradient. That costs nothing at 1 Gbit/s, and "
     "computing time on faster networks: see docs/reliability.md."},
    {Var::kCodecThreads, "PERSEUS_CODEC_THREADS", "", VarType::kInt, "0", "0..64", false,
     "How many threads of a rank encode and decode gradients; results do not depend on it. On links of 10 Gbit/s and "
     "more, one thread takes longer than the network. 0 = a quarter of the cores that the process may use, divided by "
     "the ranks of its host, and at most four."},
    {Var::kCpuOperations, "PERSEUS_CPU_OPERATIONS", "", VarType::kChoice, "perseus", "perseus|mpi", true,
     "What carries out collectives of all ranks on CPU tensors: perseus = Perseus itself, mpi = the MPI library of the "
     "mpirun that has started the ranks (perseusrun --mpi), where it can do the same; then Perseus treats all ranks "
     "alike. Other process sets than the global one use Perseus' own transports in any case."},
    {Var::kGpuOperations, "PERSEUS_GPU_OPERATIONS", "", VarType::kChoice, "auto", "auto|perseus|nccl", true,
     "What sums tensors on GPUs: auto = NCCL inside a host, if it joins the ranks of each host (2.18 or newer, one "
     "rank for each GPU), and Perseus between hosts, or NCCL there, too, if all hosts have RDMA and the tuner has "
     "measured that gradients are faster with it. perseus = Perseus itself, in host memory. nccl = NCCL between "
     "hosts as well, and as float32 unless a codec is chosen."},
    {Var::kGpuCodecs, "PERSEUS_GPU_CODECS", "", VarType::kBool, "0", "", false,
     "1 = where each host has one rank, or NCCL joins its ranks, GPUs encode gradients as float16, bfloat16, int8, "
     "int4, int2 or top-k themselves, so that only encoded bytes are copied to the host and back. The bits are those "
     "of the CPU's codecs. Off by default, since it has run on stand-ins for GPUs only."},
    {Var::kNcclLibrary, "PERSEUS_NCCL_LIBRARY", "", VarType::kString, "", "", false,
     "Path of the libnccl.so.2 that Perseus opens. Unset = the one that the process has loaded, or else one that pip "
     "or the system has installed."},
    {Var::kSpin, "PERSEUS_SPIN_US", "", VarType::kInt, "-1", "-1..1000000", false,
     "Microseconds for which a blocked caller polls before it sleeps. -1 = 200 if the ranks of this host have a core "
     "each, else 0."},
    {Var::kSimd, "PERSEUS_SIMD", "", VarType::kChoice, "auto", "auto|avx512|avx2|neon|portable", false,
     "Instruction set of the kernels; all of them compute the same bits. auto = the best that this processor has."},
    {Var::kMasterPort, "PERSEUS_MASTER_PORT", "", VarType::kInt, "6666", "1..65535", false,
     "Port of the rendezvous server if rank 0 runs it. If the port is busy, the server takes the next free one, except "
     "where rank 0 has no channel to announce it: with srun without PMI, and with torch's variables without PyTorch."},
    {Var::kUseDdpLauncher, "PERSEUS_USE_DDP_LAUNCHER", "", VarType::kBool, "1", "", false,
     "For scripts that run torch.distributed on Perseus: 1 = rank and size come from torch's launcher where it has set "
     "them, else from mpirun, srun or perseusrun; 0 = always from the latter. Every other script needs no choice."},
    {Var::kSecretFile, "PERSEUS_SECRET_FILE", "", VarType::kString, "", "", false,
     "File with the job's secret, which only its owner may read. Unset = the launcher or rank 0 creates a secret."},
    {Var::kFlightRecorder, "PERSEUS_FLIGHT_RECORDER", "TMPDIR", VarType::kString, "/tmp", "", false,
     "Directory into which every rank writes its last 256 operations when the job fails. It keeps a user's newest 16 "
     "files, or four for each rank. off = write nothing."},
    {Var::kInspectSignal, "PERSEUS_INSPECT_SIGNAL", "", VarType::kInt, "43", "0..64", false,
     "Number of the signal at which a process says what it waits for and where its threads are; `perseusrun --inspect` "
     "sends it to all. It is 0, 10, 12, or 34 to 64, since others have a meaning; 0 = none. A signal that the script "
     "handles is left to it."},
    {Var::kTimeline, "HOROVOD_TIMELINE", "", VarType::kString, "", "", false,
     "File into which rank 0 writes a Chrome trace of every operation from init() on; Perfetto opens it at any time. "
     "DYNAMIC = record only between start_timeline() and stop_timeline(), which need this variable."},
    {Var::kTimelineMarkCycles, "HOROVOD_TIMELINE_MARK_CYCLES", "", VarType::kBool, "0", "", false,
     "1 = the timeline marks where negotiation rounds begin."},
    {Var::kTimelineAllRanks, "PERSEUS_TIMELINE_ALL_RANKS", "", VarType::kBool, "0", "", false,
     "1 = every rank writes a timeline, with its number before the file's suffix, for perseus-report: rank 0 writes "
     "trace.json, rank 1 writes trace.rank1.json."},
    {Var::kAccumulateSteps, "PERSEUS_ACCUMULATE_N_STEPS", "", VarType::kInt, "1", "1..1000000", true,
     "Number of steps whose gradients each rank sums before the sums are averaged over the ranks and the optimizer "
     "takes one step: 1/N of the traffic. The batch is N times as large, so adapt the learning rate."},
    {Var::kOfflineNegotiation, "PERSEUS_OFFLINE_NEG", "", VarType::kBool, "0", "", true,
     "1 = learn the order of named allreduces during the first steps, then run without negotiation: ranks send only "
     "data until one of them deviates."},
    {Var::kNanCheck, "PERSEUS_ALLREDUCE_NANCHECK", "PERSEUS_ALLREDUCE_NANHECK", VarType::kBool, "0", "", true,
     "1 = look for NaN in every gradient that is sent. All ranks learn the tensor and the rank before the optimizer's "
     "step."},
    {Var::kNanAction, "PERSEUS_ALLREDUCE_NANCHECK_ACTION", "", VarType::kChoice, "report", "report|raise|skip", true,
     "What happens after a NaN: report = a warning on every rank, raise = an error on every rank, skip = the warning, "
     "and no rank takes the optimizer's step. A NaN that only the sum of one of several hosts has, as with "
     "Compression.rotate, is known there alone: with skip, zeros take its place."},
    {Var::kPerfCheckSteps, "PERSEUS_PERF_CHECK_N_STEPS", "", VarType::kInt, "0", "0..1000000000", true,
     "Number of steps after which the ranks compare how long they compute, without the time that they wait for each "
     "other; the lowest rank of a process set names its slow ones. 100 is a good value, 0 = off."},
    {Var::kParameterCheckSteps, "PERSEUS_PARAMETER_CHECK_N_STEPS", "", VarType::kInt, "0", "0..1000000000", true,
     "Number of steps after which the ranks compare their parameters bit by bit. A difference is an error on every "
     "rank that names the first parameter that differs, and its ranks. 100 is a good value, 0 = off."},
    {Var::kKeepFreedMemory, "PERSEUS_KEEP_FREED_MEMORY", "", VarType::kBool, "1", "", false,
     "1 = the process keeps up to 1 GiB of the memory that a training step with TensorFlow or PyTorch frees, so that "
     "the next step does not begin with page faults. 0 = Perseus leaves malloc's thresholds as they are, which it also "
     "does if MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, MALLOC_MMAP_MAX_ or GLIBC_TUNABLES sets them."},
    {Var::kLogLevel, "PERSEUS_LOG_LEVEL", "HOROVOD_LOG_LEVEL", VarType::kChoice, "warning",
     "trace|debug|info|warning|error|fatal", false,
     "Least severe level of messages that are written to standard "
     "error."},
    {Var::kLogHideTime, "HOROVOD_LOG_HIDE_TIME", "", VarType::kBool, "0", "", false,
     "1 = log lines begin without the time."},
};

template <class Choice>
struct Named {
  Choice value;
  std::string_view text;
};

// Does the table allow exactly these texts for the enum's variable, in the enum's order?
template <class Choice, size_t N>
constexpr bool agree(const Named<Choice> (&choices)[N]) {
  const Variable& entry = kTable[static_cast<int>(kVarOf<Choice>)];
  std::string_view rest = entry.allowed;
  if (entry.id != kVarOf<Choice> || entry.type != VarType::kChoice) return false;
  for (size_t i = 0; i < N; ++i) {
    const std::string_view text = rest.substr(0, rest.find('|'));
    if (choices[i].value != static_cast<Choice>(i) || choices[i].text != text) return false;
    if ((text.size() == rest.size()) != (i + 1 == N)) return false;
    if (i + 1 < N) rest.remove_prefix(text.size() + 1);
  }
  return true;
}

static_assert(agree<Autotune>({{Autotune::kAuto, "auto"}, {Autotune::kOff, "0"}, {Autotune::kOn, "1"}}));
static_assert(agree<AllreduceDtype>({{AllreduceDtype::kAuto, "auto"},
                                     {AllreduceDtype::kHalf, "0"},
                                     {AllreduceDtype::kFull, "1"},
                                     {AllreduceDtype::kHalfBetweenHosts, "2"}}));
static_assert(agree<AllreduceCodec>({{AllreduceCodec::kDtype, "dtype"},
                                     {AllreduceCodec::kInt8, "int8"},
                                     {AllreduceCodec::kInt4, "int4"},
                                     {AllreduceCodec::kInt2, "int2"},
                                     {AllreduceCodec::kPowerSgd, "powersgd"},
                                     {AllreduceCodec::kLossless, "lossless"},
                                     {AllreduceCodec::kAuto, "auto"}}));
static_assert(agree<ChangeAllgather>(
    {{ChangeAllgather::kAuto, "auto"}, {ChangeAllgather::kStack, "0"}, {ChangeAllgather::kJoin, "1"}}));
static_assert(agree<AllreduceMode>(
    {{AllreduceMode::kAuto, "auto"}, {AllreduceMode::kFlat, "0"}, {AllreduceMode::kOneRankPerHost, "1"}}));
static_assert(agree<TwoD>({{TwoD::kAuto, "auto"}, {TwoD::kOff, "0"}, {TwoD::kOn, "1"}}));
static_assert(agree<AllreduceAlgorithm>({{AllreduceAlgorithm::kAuto, "auto"},
                                         {AllreduceAlgorithm::kPairwise, "pairwise"},
                                         {AllreduceAlgorithm::kHalvingDoubling, "halving_doubling"},
                                         {AllreduceAlgorithm::kRing, "ring"},
                                         {AllreduceAlgorithm::kRecursiveDoubling, "recursive_doubling"}}));
static_assert(agree<TransportChoice>(
    {{TransportChoice::kAuto, "auto"}, {TransportChoice::kShm, "shm"}, {TransportChoice::kTcp, "tcp"}}));
static_assert(agree<CpuOperations>({{CpuOperations::kPerseus, "perseus"}, {CpuOperations::kMpi, "mpi"}}));
static_assert(agree<MomentumCorrection>(
    {{MomentumCorrection::kNone, "0"}, {MomentumCorrection::kWhole, "1"}, {MomentumCorrection::kMasking, "masking"}}));
static_assert(agree<GpuOperations>(
    {{GpuOperations::kAuto, "auto"}, {GpuOperations::kPerseus, "perseus"}, {GpuOperations::kNccl, "nccl"}}));
static_assert(agree<Simd>({{Simd::kAuto, "auto"},
                           {Simd::kAvx512, "avx512"},
                           {Simd::kAvx2, "avx2"},
                           {Simd::kNeon, "neon"},
                           {Simd::kPortable, "portable"}}));
static_assert(
    agree<NanAction>({{NanAction::kReport, "report"}, {NanAction::kRaise, "raise"}, {NanAction::kSkip, "skip"}}));
static_assert(agree<LogLevel>({{LogLevel::kTrace, "trace"},
                               {LogLevel::kDebug, "debug"},
                               {LogLevel::kInfo, "info"},
                               {LogLevel::kWarning, "warning"},
                               {LogLevel::kError, "error"},
                               {LogLevel::kFatal, "fatal"}}));
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

// Horovod's, of what Perseus does in another way. `as_here`: a value that asks for just that.
struct NeedlessVariable {
  const char *name, *as_here, *why;
};
constexpr NeedlessVariable kNeedless[] = {
    {"HOROVOD_THREAD_AFFINITY", "", "the thread of Perseus sleeps unless there is something to do"},
    {"HOROVOD_CACHE_CAPACITY", "1024", "Perseus remembers the negotiation of every tensor"},
    {"HOROVOD_HIERARCHICAL_ALLGATHER", "0", "an allgather chooses its way itself"},
    {"HOROVOD_DISABLE_GROUP_FUSION", "0", "HOROVOD_FUSION_THRESHOLD limits what is fused, groups or not"},
    {"HOROVOD_BATCH_D2D_MEMCOPIES", "1", "Perseus always copies tensors on GPUs in batches"},
    {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "", "the tuner decides itself how long it measures"},
    {"HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "", "the tuner decides itself how long it measures"},
    {"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "", "the tuner tries a few settings in turn"},
    {"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "", "the tuner tries a few settings in turn"},
};

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
  const PlainNumbers plain;
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

// As short as it can be read back.
std::string text_of(double number) {
  const PlainNumbers plain;
  char text[32];
  for (int digits = 1; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, number);
    if (std::strtod(text, nullptr) == number) break;
  }
  return text;
}

// setenv() may move the list of variables while another thread goes through it.
Mutex environment_mutex;

// Null = not set.
const char* look_up_in_environment(const std::string& name) {
  const MutexLock lock(environment_mutex);
  return std::getenv(name.c_str());
}

std::vector<std::string> names_in_environment() {
  std::vector<std::string> names;
  const MutexLock lock(environment_mutex);
  for (char** entry = environ; *entry != nullptr; ++entry) names.emplace_back(*entry, std::strcspn(*entry, "="));
  return names;
}

}  // namespace

std::string environment_value(const std::string& name) {
  const char* value = look_up_in_environment(name);
  return value == nullptr ? "" : value;
}

void set_where_unset(const std::string& name, const std::string& value) {
  const MutexLock lock(environment_mutex);
  ::setenv(name.c_str(), value.c_str(), 0);
}

std::vector<std::string> doubtful_variables() {
  // So that PERSEUS_SIZE, of a launcher, is not taken for PERSEUS_SIMD.
  constexpr size_t kLettersForOneWrong = 8;
  constexpr const char* kPrefixes[] = {"PERSEUS_", "HOROVOD_", "LIGHT_", "TIACC_"};
  std::vector<std::string> known, found;
  for (const NeedlessVariable& needless : kNeedless) {
    const std::string value = environment_value(needless.name);
    if (!value.empty() && value != needless.as_here)
      found.push_back(std::string(needless.name) + "=" + value + " has no effect: " + needless.why);
  }
  for (const Variable& entry : kTable)
    for (const std::string& name : names_of(entry)) known.push_back(name);
  for (const std::string& name : names_in_environment()) {
    const auto begins = [&](const std::string& prefix) { return name.compare(0, prefix.size(), prefix) == 0; };
    if (std::none_of(std::begin(kPrefixes), std::end(kPrefixes), begins)) continue;
    const auto nearer = [&](const auto& a, const auto& b) { return distance(name, a) < distance(name, b); };
    const std::string& meant = *std::min_element(known.begin(), known.end(), nearer);
    const size_t wrong = distance(name, meant);
    const bool is_needless = std::any_of(std::begin(kNeedless), std::end(kNeedless),
                                         [&](const NeedlessVariable& needless) { return name == needless.name; });
    if (!is_needless && wrong > 0 && wrong <= name.size() / kLettersForOneWrong)
      found.push_back("Unknown variable " + name + "; did you mean " + meant + "?");
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
    given_[static_cast<int>(entry.id)] = take_first(overridden) || take_first(look_up_in_environment);
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
      text_[i] = std::to_string(integer_[i]);
      break;
    case VarType::kFloat:
      number_[i] = parse_number(entry, source_name, value, false);
      text_[i] = text_of(number_[i]);
      break;
    case VarType::kBool:
      // Horovod reads strtol(value) > 0, under which "true" is false; here it is what it says.
      if (small == "1" || small == "true" || small == "on" || small == "yes") integer_[i] = 1;
      else if (small == "0" || small == "false" || small == "off" || small == "no") integer_[i] = 0;
      else refuse(source_name, value, "0 or 1");
      text_[i] = std::to_string(integer_[i]);
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

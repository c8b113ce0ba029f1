// Every knob of the core: one table {name, aliases, type, default, allowed, help} from which parsing, perseusrun --help
// and docs/config.md derive. The only place that calls getenv. A Config is immutable once built, so thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/choices.h"

namespace perseus {

enum class Var {
  kStreams,
  kFusionThreshold,
  kFusionParts,
  kStreamTuningDisable,
  kAutotune,
  kAutotuneLog,
  kTunerReplay,
  kNcclEnable,
  kAllreduceDtype,
  kAllreduceCodec,
  kLinkGbit,
  kLinkCheck,
  kGradientScale,
  kTopK,
  kTopKRatio,
  kTopKThreshold,
  kTopKHalf,
  kTopKWarmUp,
  kTopKMomentum,
  kPowerSgdRank,
  kPowerSgdWarmUp,
  kDownsample,
  kGradientMomentum,
  kChangeAllgather,
  kAllreduceMode,
  kTwoD,
  kAllreduceAlgorithm,
  kIntraSize,
  kHierarchicalThreshold,
  kCycleTime,
  kTimeout,
  kStartTimeout,
  kStallCheckDisable,
  kStallCheckTime,
  kStallShutdownTime,
  kInterfaces,
  kTransport,
  kChecksum,
  kCodecThreads,
  kCpuOperations,
  kGpuOperations,
  kGpuCodecs,
  kNcclLibrary,
  kSpin,
  kSimd,
  kMasterPort,
  kUseDdpLauncher,
  kSecretFile,
  kFlightRecorder,
  kInspectSignal,
  kTimeline,
  kTimelineMarkCycles,
  kTimelineAllRanks,
  kAccumulateSteps,
  kOfflineNegotiation,
  kNanCheck,
  kNanAction,
  kPerfCheckSteps,
  kParameterCheckSteps,
  kKeepFreedMemory,
  kLogLevel,
  kLogHideTime,
  kCount
};

enum class VarType { kInt, kFloat, kBool, kString, kChoice };

struct Variable {
  Var id;
  const char* name;
  const char* aliases;  // comma-separated; the first one set wins, the name itself before any alias
  VarType type;
  const char* default_value;  // as text; "" = unset
  const char* allowed;        // kInt, kFloat: "low..high"; kChoice: "a|b|c"; else ""
  bool affects_results;       // compared across ranks at init: a difference is an error
  const char* help;           // one or two sentences for --help and docs/config.md
};

// The variable to which an enum of base/choices.h belongs.
template <class Choice>
inline constexpr Var kVarOf = Var::kCount;
template <>
inline constexpr Var kVarOf<Autotune> = Var::kAutotune;
template <>
inline constexpr Var kVarOf<AllreduceDtype> = Var::kAllreduceDtype;
template <>
inline constexpr Var kVarOf<AllreduceCodec> = Var::kAllreduceCodec;
template <>
inline constexpr Var kVarOf<ChangeAllgather> = Var::kChangeAllgather;
template <>
inline constexpr Var kVarOf<AllreduceMode> = Var::kAllreduceMode;
template <>
inline constexpr Var kVarOf<TwoD> = Var::kTwoD;
template <>
inline constexpr Var kVarOf<AllreduceAlgorithm> = Var::kAllreduceAlgorithm;
template <>
inline constexpr Var kVarOf<TransportChoice> = Var::kTransport;
template <>
inline constexpr Var kVarOf<CpuOperations> = Var::kCpuOperations;
template <>
inline constexpr Var kVarOf<MomentumCorrection> = Var::kTopKMomentum;
template <>
inline constexpr Var kVarOf<GpuOperations> = Var::kGpuOperations;
template <>
inline constexpr Var kVarOf<Simd> = Var::kSimd;
template <>
inline constexpr Var kVarOf<NanAction> = Var::kNanAction;
template <>
inline constexpr Var kVarOf<LogLevel> = Var::kLogLevel;

// The value of a variable of the environment; "" = not set. For variables of launchers, not for those of the table.
std::string environment_value(const std::string& name);

// Sets a variable of another library, unless the user has. Other contexts of the process may read theirs meanwhile.
void set_where_unset(const std::string& name, const std::string& value);

// "Unknown variable NAME; did you mean OTHER?" for every name of the environment that is not in the table, but differs
// from a name of the table in at most one letter of eight. "NAME=VALUE has no effect: WHY" for Horovod's variables that
// Perseus has no use for.
std::vector<std::string> doubtful_variables();

const Variable& variable(Var id);
const char* var_type_name(VarType type);

class Config {
 public:
  // From the environment, overridden by "NAME=VALUE" texts. Throws Error(kInvalidArgument) naming variable and value.
  explicit Config(const std::vector<std::string>& overrides = {});

  bool is_set(Var id) const { return !text_[static_cast<int>(id)].empty(); }
  // By the environment or an override, whatever the value.
  bool given(Var id) const { return given_[static_cast<int>(id)]; }
  // With the default filled in; the same for values that are equal, however they were written.
  const std::string& text(Var id) const { return text_[static_cast<int>(id)]; }
  // The name or alias under which it was given; the name where it was not.
  const std::string& source(Var id) const { return source_[static_cast<int>(id)]; }
  int64_t integer(Var id) const { return integer_[static_cast<int>(id)]; }
  // The value of the enum's variable.
  template <class Choice>
  Choice choice() const {
    static_assert(kVarOf<Choice> != Var::kCount, "no variable has these choices");
    return static_cast<Choice>(integer(kVarOf<Choice>));
  }
  double number(Var id) const { return number_[static_cast<int>(id)]; }
  bool flag(Var id) const { return integer(id) != 0; }

 private:
  void parse(const Variable& variable, const std::string& source_name, const std::string& value);

  std::string text_[static_cast<int>(Var::kCount)];
  std::string source_[static_cast<int>(Var::kCount)];
  int64_t integer_[static_cast<int>(Var::kCount)] = {};
  double number_[static_cast<int>(Var::kCount)] = {};
  bool given_[static_cast<int>(Var::kCount)] = {};
};

}  // namespace perseus

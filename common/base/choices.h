// The choices of every variable of type choice, as enums in the order of the table in base/config.cc, which checks at
// compile time that order, number and texts agree. Constants only.
#pragma once

#include <cstdint>

namespace perseus {

enum class Autotune : int64_t { kAuto, kOff, kOn };
enum class AllreduceDtype : int64_t { kAuto, kHalf, kFull, kHalfBetweenHosts };
enum class AllreduceCodec : int64_t { kDtype, kInt8, kInt4, kInt2, kPowerSgd, kLossless, kAuto };
enum class ChangeAllgather : int64_t { kAuto, kStack, kJoin };
enum class AllreduceMode : int64_t { kAuto, kFlat, kOneRankPerHost };
enum class TwoD : int64_t { kAuto, kOff, kOn };
enum class AllreduceAlgorithm : int64_t { kAuto, kPairwise, kHalvingDoubling, kRing, kRecursiveDoubling };
enum class CpuOperations : int64_t { kPerseus, kMpi };
enum class MomentumCorrection : int64_t { kNone, kWhole, kMasking };
enum class GpuOperations : int64_t { kAuto, kPerseus, kNccl };
enum class TransportChoice : int64_t { kAuto, kShm, kTcp };
enum class Simd : int64_t { kAuto, kAvx512, kAvx2, kNeon, kPortable };
enum class NanAction : int64_t { kReport, kRaise, kSkip };
enum class LogLevel : int64_t { kTrace, kDebug, kInfo, kWarning, kError, kFatal };

}  // namespace perseus

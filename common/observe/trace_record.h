// What a pass records for the timeline: one slot of the recording's ring. Plain values.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "request/request.h"

namespace perseus {

struct TraceRecord {
  enum class What : uint8_t {
    kOperation,  // a request ended; at: submitted (0 = not by this rank), agreed, ended
    kBucket,     // a fused execution ended; at: begun, first byte, last byte. `count` members follow
    kMember,     // a request that was part of it; at: agreed, submitted (0 = not by this rank)
    kRound,      // a negotiation round began; at[0]: when
    kTuned,      // the tuner has settled; at[0]: when. `bytes` of a bucket, `stream`s; the name says why
  };

  What what = What::kOperation;
  Kind kind = Kind::kAllreduce;
  DType dtype = DType::kFloat32;
  bool ok = true;
  bool several = false;                // member: its request may be in several buckets at once
  uint8_t transports = 0;              // a transport_bit() each
  CodecKind codec = CodecKind::kNone;  // of a bucket
  bool transient = false;              // operation, member: its name does not come again
  int32_t group = 0;
  int32_t stream = 0;
  int32_t ranks = 0;       // in the group
  int32_t last_rank = -1;  // operation: who submitted last, where that is known
  uint32_t count = 0;      // operation: tensors; bucket: members
  uint32_t name_bytes = 0;
  uint64_t number = 0;   // of the bucket or round, the same on all ranks
  uint64_t bytes = 0;    // of this rank's tensors
  int64_t at[3] = {};    // of the monotonic clock; 0 = never
  int64_t codec_ns = 0;  // bucket: spent on encoding and decoding
  char name[48] = {};    // its beginning; the rest lies in the slots that follow
};
static_assert(sizeof(TraceRecord) == 128, "two cache lines");

}  // namespace perseus

// What a rank asks for: the description that all ranks compare, and the entry that carries it through the engine.
// Plain values; the engine's driver owns entries in flight.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/span.h"
#include "compression/residuals.h"
#include "compression/terms.h"

namespace perseus {

// Same numbers as enum perseus_kind, which has neither kBreak nor kBlocked.
enum class Kind : uint8_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kAlltoall = 3,
  kReduceScatter = 4,
  kBarrier = 5,
  kAddGroup = 6,
  kRemoveGroup = 7,
  kJoin = 8,
  kBreak = 9,     // only announced: a rank leaves the schedule (scheduling.cc)
  kBlocked = 10,  // only announced: all that a rank could do is wait (deadlock.cc)
};
constexpr int kKindCount = 11;
const char* kind_name(Kind kind);  // "ALLREDUCE", as Horovod's messages say it

struct TensorDescription {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;

  int64_t count() const;
  size_t bytes() const { return static_cast<size_t>(count()) * dtype_size(dtype); }
  // Elements of one row of dimension 0.
  int64_t row_count() const;
};

// Everything ranks must agree on (but for dimension 0 of allgather and alltoall).
struct Description {
  Kind kind = Kind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0, postscale = 1.0;
  int root = 0;  // global rank
  int priority = 0;
  bool transient = false;
  bool gradient = false;
  CompressionTerms compression;
  std::vector<TensorDescription> tensors;
  std::vector<int> ranks;  // kAddGroup: members, kRemoveGroup: group id
  // Told, but nothing to agree on:
  std::vector<uint32_t> nans;   // tensors in which this rank has found a NaN
  std::vector<uint32_t> times;  // of the tuner's trials; once agreed, the longest of all ranks
  Flush flush = Flush::kNone;   // what this rank wants; once all are ready, the most that any does
  std::string refusal;          // why this rank cannot do it; then there are no tensors

  bool tells() const { return !nans.empty() || flush != Flush::kNone || !refusal.empty(); }
};

// Of every tensor, in bytes.
std::vector<size_t> tensor_bytes(const Description& description);

// Would a rank that announced `agreed` be served by one that now brings `now`?
bool same_request(const Description& agreed, const Description& now);

// The error all ranks get, in Horovod's words, or "" when the descriptions of all ranks (in group order) agree.
// `ranks` are the members' global ranks.
std::string find_mismatch(const std::string& name, const std::vector<Description>& by_rank,
                          const std::vector<int>& ranks);

// As announced to the other ranks: little-endian, self-delimiting. parse() throws Error(kIo) on anything malformed.
void append_request(const std::string& name, const Description& description, std::string* blob);
class BlobReader {
 public:
  explicit BlobReader(const std::string& blob) : at_(blob.data()), end_(at_ + blob.size()) {}
  bool at_end() const { return at_ == end_; }
  void read_request(std::string* name, Description* description);

 private:
  template <typename T>
  T take();
  size_t take_count(size_t element_bytes);
  std::string take_text();

  const char* at_;
  const char* end_;
};

struct Output {
  Byte* data = nullptr;  // malloc'ed
  size_t bytes = 0;
  std::vector<int64_t> shape;
  std::vector<int64_t> received_splits;
};

// What became of a gradient that was submitted; same numbers as enum perseus_gradient.
enum class GradientOutcome : uint8_t { kReduced = 0, kHeld = 1, kSkipped = 2 };

// Whom to tell that a handle is done.
struct Completion {
  void (*call)(void* arg, int64_t handle) = nullptr;
  void* arg = nullptr;
};

struct Name;  // control/negotiation.h

// A submitted request until its handle is done. Recycled, so that a step allocates nothing.
struct Entry {
  Name* name = nullptr;               // what negotiation remembers of it
  const std::string* text = nullptr;  // the name itself; set with `name`
  Description description;
  struct Buffers {
    const Byte* in = nullptr;
    Byte* out = nullptr;
  };
  std::vector<Buffers> buffers;  // one for each tensor
  std::vector<int64_t> splits;   // alltoall: rows for each member
  struct Nan {
    int rank;  // global; -1 = in the sum alone
    uint32_t tensor;
  };
  std::vector<Nan> nans;  // found by any rank; once all ranks have submitted it
  uint32_t handle = 0;    // index in the handle table
  Completion done;
  int group = 0;
  int64_t submitted_ns = 0;
  int64_t agreed_ns = 0;   // all ranks have submitted it; 0 = not yet
  int64_t started_ns = 0;  // its first bytes may move; 0 = not yet
  int last_rank = -1;      // submitted it last; -1 = not known
  int executions_left = 0;
  size_t bytes = 0;
  uint64_t gradient_of = 0;    // whose gradient, 0 = no gradient
  Residuals::Lease residuals;  // of what is sent encoded, where the codec holds something back
  // Not submitted here: zeros that a rank which has joined gives to an operation of the others. It has no handle.
  bool stand_in = false;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> zeros;
};

}  // namespace perseus

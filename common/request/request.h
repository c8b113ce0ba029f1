// What a rank asks for: the description that all ranks compare, and the entry that carries it through the engine.
// Plain values; the progress engine owns entries in flight.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/device.h"
#include "base/dtype.h"
#include "base/fields.h"
#include "base/span.h"
#include "compression/residuals.h"
#include "compression/terms.h"
#include "cuda/staging.h"

namespace perseus {

// Same numbers as enum perseus_kind.
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
  kSend = 9,
  kReceive = 10,
};
constexpr int kKindCount = 11;
// All ranks of a group agree on these; the others concern two ranks.
constexpr int kNegotiatedKinds = 9;
constexpr bool is_point_to_point(Kind kind) { return static_cast<int>(kind) >= kNegotiatedKinds; }
const char* kind_name(Kind kind);  // "ALLREDUCE", as Horovod's messages say it

struct TensorDescription {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;

  static constexpr auto fields() {
    return std::make_tuple(field("dtype", &TensorDescription::dtype), field("shape", &TensorDescription::shape));
  }
  int64_t count() const;
  size_t bytes() const { return static_cast<size_t>(count()) * dtype_size(dtype); }
  // Elements of one row of dimension 0.
  int64_t row_count() const;
};

// A request has three parts: what all ranks must say alike (RequestTerms), what chooses the compression
// (CompressionTerms; all ranks must say it alike, too) and what only rides along (RequestNotes). Each part lists its
// fields once, in fields(). Comparing, the error about a mismatch, announcing and printing follow from the lists.

struct RequestTerms;
using MismatchText = std::string (*)(const RequestTerms& a, const RequestTerms& b);

// If ranks differ in the field, the error is `mismatch`, "Mismatched …: One rank did", with " X, but another rank did
// Y." behind it; or what `text` returns, where "" means that the difference does not matter.
template <typename Value>
struct ComparedField : Field<RequestTerms, Value> {
  const char* mismatch;
  MismatchText text;
};
template <typename Value>
constexpr ComparedField<Value> compared(const char* name, Value RequestTerms::* member, const char* mismatch) {
  return {{name, member}, mismatch, nullptr};
}
template <typename Value>
constexpr ComparedField<Value> compared(const char* name, Value RequestTerms::* member, MismatchText text) {
  return {{name, member}, nullptr, text};
}
std::string tensor_mismatch(const RequestTerms& a, const RequestTerms& b);
std::string factor_mismatch(const RequestTerms& a, const RequestTerms& b);
std::string gradient_mismatch(const RequestTerms& a, const RequestTerms& b);
std::string root_mismatch(const RequestTerms& a, const RequestTerms& b);
std::string ranks_mismatch(const RequestTerms& a, const RequestTerms& b);

struct RequestTerms {
  Kind kind = Kind::kAllreduce;
  std::vector<TensorDescription> tensors;  // dimension 0 may differ for allgather and alltoall
  double prescale = 1.0, postscale = 1.0;
  ReduceOp op = ReduceOp::kSum;
  bool gradient = false;
  int root = 0;  // global rank
  // kAddGroup: members, kRemoveGroup: group id; kAllreduce, kBroadcast: orders of dimensions in memory, if not by rows
  std::vector<int> ranks;

  // In the order in which Horovod checks them.
  static constexpr auto fields() {
    return std::make_tuple(
        compared("kind", &RequestTerms::kind, "Mismatched operations: One rank did an"),
        compared("tensors", &RequestTerms::tensors, tensor_mismatch),
        compared("prescale", &RequestTerms::prescale, factor_mismatch),
        compared("postscale", &RequestTerms::postscale, factor_mismatch),
        compared("op", &RequestTerms::op, "Mismatched reduction operation: One rank sent reduction op"),
        compared("gradient", &RequestTerms::gradient, gradient_mismatch),
        compared("root", &RequestTerms::root, root_mismatch), compared("ranks", &RequestTerms::ranks, ranks_mismatch));
  }
};

struct RequestNotes {
  int priority = 0;              // the lowest rank's goes for all
  bool transient = false;        // the name will not come again
  std::vector<uint32_t> nans;    // tensors in which this rank has found a NaN
  std::vector<uint32_t> times;   // of the tuner's trials; once agreed, the longest of all ranks
  Flush flush = Flush::kNone;    // what this rank wants; once all are ready, the most that any does
  bool warms_up = false;         // PowerSGD must not begin yet, on this rank; once all are ready, on any
  bool new_momenta = false;      // this rank knows no momenta of earlier steps; once all are ready, some rank does not
  bool stays_on_device = false;  // this rank's tensors can be reduced there; once all are ready, everybody's can
  bool proportional = false;     // for auto: this rank's step is proportional to the gradient; once all are ready,
                                 // everybody's is
  int outdated = 0;              // number of the measurement of links that this rank wants to be repeated, or 0; once
                                 // all are ready, the largest
  std::string refusal;           // why this rank cannot do it; then there are no tensors

  static constexpr auto fields() {
    return std::make_tuple(
        field("priority", &RequestNotes::priority), field("transient", &RequestNotes::transient),
        field("nans", &RequestNotes::nans), field("times", &RequestNotes::times), field("flush", &RequestNotes::flush),
        field("warms_up", &RequestNotes::warms_up), field("new_momenta", &RequestNotes::new_momenta),
        field("stays_on_device", &RequestNotes::stays_on_device), field("proportional", &RequestNotes::proportional),
        field("outdated", &RequestNotes::outdated), field("refusal", &RequestNotes::refusal));
  }
  // Must the other ranks learn of it, so that a readiness bit is not enough?
  bool tells() const {
    return !nans.empty() || flush != Flush::kNone || warms_up || new_momenta || outdated != 0 || !refusal.empty();
  }
};

struct Description : RequestTerms, RequestNotes {
  CompressionTerms compression;
};

// Rows of a reduce-scatter that rank r of the group gets; the first ranks get one more where they do not divide evenly.
inline int64_t scattered_rows(int64_t rows, int64_t ranks, int64_t r) {
  return rows / ranks + (r < rows % ranks ? 1 : 0);
}

// Of every tensor, in bytes.
std::vector<size_t> tensor_bytes(const Description& description);

// What residuals of its tensors belong to.
void describe_tensors(const Description& description, Residuals::Tensors* tensors);

// Would a rank that announced `agreed` be served by one that now brings `now`?
bool same_request(const Description& agreed, const Description& now);

// What one description can be wrong about all by itself, in Horovod's words; "" when nothing.
std::string check_alone(const Description& description);

// The error all ranks get, in Horovod's words, or "" when the descriptions of all ranks (in group order) agree.
// `ranks` are the members' global ranks.
std::string find_mismatch(const std::string& name, const std::vector<Description>& by_rank,
                          const std::vector<int>& ranks);

// Every field with its value, for messages: "kind=ALLREDUCE tensors=[{dtype=float32 shape=[5]}] …".
std::string to_text(const Description& description);

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
  const std::string* text = nullptr;  // the name itself; set with `name`, or this entry's own
  Description description;
  struct Buffers {
    const Byte* in = nullptr;
    Byte* out = nullptr;
    Device device = {};

    Buffers from(size_t offset) const { return Buffers{in + offset, out + offset, device}; }
  };
  std::vector<Buffers> buffers;  // one for each tensor
  std::vector<int64_t> splits;   // alltoall: rows for each member
  int64_t tag = 0;               // of a send or receive, whose other rank is description.root
  std::string own_text;          // of a send or receive, which negotiation does not know
  struct Nan {
    int rank;  // global; -1 = in the sum alone
    uint32_t tensor;
  };
  std::vector<Nan> nans;     // found by any rank; once all ranks have submitted it
  bool one_of_many = false;  // its sum is that of one of several hosts
  uint32_t handle = 0;       // index in the handle table
  Completion done;
  int group = 0;
  uint64_t admitted_after = 0;  // so many parts of rounds that this rank had composed
  int64_t submitted_ns = 0;
  int64_t agreed_ns = 0;   // all ranks have submitted it; 0 = not yet
  int64_t started_ns = 0;  // its first bytes may move; 0 = not yet
  int last_rank = -1;      // submitted it last; -1 = not known
  // Buckets that have to be done before it is, and one more until all of them are known; 0 = it has ended.
  int executions_left = 1;
  size_t bytes = 0;
  uint64_t gradient_of = 0;                // whose gradient, 0 = no gradient
  double learning_rate = 0;                // of the step that it is for, 0 = not known
  Residuals::Lease residuals;              // of what is sent encoded, where the codec holds something back
  std::unique_ptr<cuda::Staging> staging;  // of tensors on a device, whose images `buffers` are
  // Not submitted here: zeros that a rank which has joined gives to an operation of the others. It has no handle.
  bool stand_in = false;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> zeros;
};

// One execution less; appends the entry once it has ended.
inline void end_execution(Entry* entry, std::vector<Entry*>* ended) {
  if (entry->executions_left == 1) ended->push_back(entry);
  --entry->executions_left;
}

// Moves entries that have not ended, each once, though several lists may name it. Where there is no memory for that,
// `entries` keeps the others.
inline void give_up(std::vector<Entry*>* entries, std::vector<Entry*>* given_up) {
  for (; !entries->empty(); entries->pop_back()) {
    Entry* entry = entries->back();
    if (entry->executions_left <= 0) continue;
    given_up->push_back(entry);
    entry->executions_left = 0;
  }
}

}  // namespace perseus

// Who has a NaN where, and what follows from that.
#include "observe/nan_check.h"

#include <cstring>

#include "kernels/kernels.h"

namespace perseus {
namespace {

constexpr size_t kMostNamed = 8;
constexpr int kSum = -1;  // in place of a rank

// Is it the sum over one of several hosts, so that the others do not know of the NaN?
bool only_here(const Entry& entry) {
  return entry.one_of_many && !entry.nans.empty() && entry.nans.front().rank == kSum;
}

// "allreduce.fc.bias on rank 1", "grouped_allreduce.fc (tensor 2 of 3 on rank 0, tensor 0 of 3 on rank 2)",
// "allreduce.fc.bias in the sum over all ranks"
std::string describe(const Entry& entry) {
  const size_t tensors = entry.description.tensors.size();
  std::string where;
  for (const Entry::Nan& nan : entry.nans) {
    where += where.empty() ? "" : ", ";
    if (tensors > 1) where += "tensor " + std::to_string(nan.tensor) + " of " + std::to_string(tensors) + " ";
    if (nan.rank != kSum) where += "on rank " + std::to_string(nan.rank);
    else where += only_here(entry) ? "in the sum over the ranks of this host" : "in the sum over all ranks";
  }
  return *entry.text + (tensors == 1 ? " " + where : " (" + where + ")");
}

}  // namespace

void NanCheck::scan(Entry* entry) const {
  if (!on_) return;
  Description& description = entry->description;
  for (size_t i = 0; i < entry->buffers.size(); ++i) {
    const TensorDescription& tensor = description.tensors[i];
    if (kernels::has_nan(tensor.dtype, entry->buffers[i].in, static_cast<size_t>(tensor.count())))
      description.nans.push_back(static_cast<uint32_t>(i));
  }
}

void NanCheck::scan_sums(const std::vector<Entry*>& finished) const {
  if (!on_) return;
  for (Entry* entry : finished) {
    const Description& description = entry->description;
    if (!description.gradient || description.kind != Kind::kAllreduce || !entry->nans.empty()) continue;
    for (size_t i = 0; i < entry->buffers.size(); ++i) {
      const TensorDescription& tensor = description.tensors[i];
      if (kernels::has_nan(tensor.dtype, entry->buffers[i].out, static_cast<size_t>(tensor.count())))
        entry->nans.push_back({kSum, static_cast<uint32_t>(i)});
    }
  }
}

void NanCheck::report(const std::vector<Entry*>& finished, const Log& log) const {
  if (!on_ || action_ == NanAction::kRaise) return;
  std::string names;
  size_t count = 0;
  bool everywhere = false;
  for (const Entry* entry : finished) {
    if (entry->nans.empty()) continue;
    everywhere |= !only_here(*entry);
    if (count++ < kMostNamed) names += (names.empty() ? "" : "; ") + describe(*entry);
  }
  if (count == 0) return;
  if (count > kMostNamed) names += "; and " + std::to_string(count - kMostNamed) + " more";
  log.warning("[nancheck] NaN in the gradient of " + names +
              (action_ != NanAction::kSkip ? ""
               : everywhere                ? ": this step is skipped on every rank"
                                           : ": zeros take its place"));
}

bool NanCheck::judge(const Entry& entry, HandleTable::Slot* slot) const {
  if (entry.nans.empty()) return false;
  if (action_ == NanAction::kRaise)
    slot->status = Status{false, ErrorKind::kNan, "[nancheck] NaN in the gradient of " + describe(entry)};
  if (action_ != NanAction::kSkip) return false;
  if (!only_here(entry)) {
    slot->gradient = GradientOutcome::kSkipped;
    return false;
  }
  for (const Entry::Nan& nan : entry.nans)
    std::memset(entry.buffers[nan.tensor].out, 0, entry.description.tensors[nan.tensor].bytes());
  return true;
}

}  // namespace perseus

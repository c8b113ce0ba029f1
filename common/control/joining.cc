// Ranks that have joined: they have no more data, and give zeros to the others' allreduces until all have joined.
//
// That a rank has joined is announced like a request, so all ranks know it from the same round on. From then on its
// readiness bits are set for every slot it can serve. Other requests have to fail, once all who have not joined want
// them; bits do not tell who wants what, so while anybody has joined these are announced by their descriptions.
#include <algorithm>

#include "base/error.h"
#include "control/negotiation.h"

namespace perseus {
namespace {

constexpr size_t kTensorAlign = 64;

size_t room_of(const TensorDescription& tensor) {
  return (tensor.bytes() + kTensorAlign - 1) / kTensorAlign * kTensorAlign;
}

std::string refusal(Kind kind) {
  switch (kind) {
    case Kind::kAllgather:
      return "Allgather is not supported with Join at this time. Specify sparse_as_dense=True if using "
             "DistributedOptimizer with sparse gradients.";
    case Kind::kBroadcast:
      return "Broadcast is not supported with Join at this time.";
    case Kind::kAlltoall:
      return "Alltoall is not supported with Join at this time.";
    case Kind::kReduceScatter:
      return "Reducescatter is not supported with Join at this time.";
    default:
      return "Process sets cannot be added or removed while ranks have joined.";
  }
}

}  // namespace

bool joined_may_miss(Kind kind) { return kind == Kind::kAllreduce || kind == Kind::kBarrier; }

void Negotiation::on_join(int rank) {
  if (joined_[rank]) return;
  joined_[rank] = true;
  ++joined_count_;
  last_joined_ = rank;
  closing_ = joined_count_ == size_;
  reannounce(closing_);
  // What is pending may be ready without this rank, which will not call for another round.
  news_ = true;
}

// Pending bits as descriptions: `all`, or those of requests that cannot do without the ranks that have joined.
void Negotiation::reannounce(bool all) {
  for (Name* name : slots_) {
    if (name == nullptr || (!all && joined_may_miss(name->agreed.kind))) continue;
    const uint64_t bit = uint64_t{1} << name->slot % 64;
    if ((bits_[name->slot / 64] & bit) == 0) continue;
    bits_[name->slot / 64] &= ~bit;
    announce(name->entry);
  }
}

void Negotiation::set_bits_for_others(std::vector<uint64_t>* bits) const {
  for (const Name* name : slots_)
    if (name != nullptr && joined_may_miss(name->agreed.kind))
      (*bits)[name->slot / 64] |= uint64_t{1} << name->slot % 64;
}

bool Negotiation::all_announced_or_joined(const Name& name) const {
  for (int rank = 0; rank < size_; ++rank)
    if (!name.announced_by[rank] && !joined_[rank]) return false;
  return true;
}

void Negotiation::touch_what_joins_complete() {
  std::vector<Name*> complete;
  {
    const MutexLock lock(mutex_);
    for (auto& [text, name] : names_)
      if (name->announced_count > 0 && name->announced_count < size_ && all_announced_or_joined(*name))
        complete.push_back(name.get());
  }
  // In an order that is the same on all ranks.
  std::sort(complete.begin(), complete.end(), [](const Name* a, const Name* b) { return a->text < b->text; });
  touched_.insert(touched_.end(), complete.begin(), complete.end());
}

std::string Negotiation::find_mismatch_but_joined(const Name& name) const {
  std::vector<Description> announced;
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (!name.announced_by[rank]) continue;
    announced.push_back(name.announced[rank]);
    ranks.push_back(ranks_[rank]);
  }
  const std::string mismatch = find_mismatch(name.text, announced, ranks);
  if (!mismatch.empty()) return mismatch;
  return joined_may_miss(announced[0].kind) ? "" : refusal(announced[0].kind);
}

// What this rank, having joined, gives to an operation that it did not submit.
Entry* Negotiation::stand_in(Name* name) {
  Entry* entry = make_entry_();
  entry->stand_in = true;
  entry->name = name;
  entry->text = &name->text;
  entry->description = name->agreed;
  entry->description.stays_on_device &= joined_count_ == 0;
  entry->description.warms_up = joined_count_ > 0;
  entry->submitted_ns = entry->agreed_ns = entry->started_ns = 0;
  entry->executions_left = 1;
  entry->last_rank = -1;
  entry->splits.clear();
  entry->nans.clear();
  entry->one_of_many = false;
  entry->buffers.clear();
  entry->bytes = 0;
  size_t room = kTensorAlign;
  for (const TensorDescription& tensor : name->agreed.tensors) {
    entry->bytes += tensor.bytes();
    room += room_of(tensor);
  }
  entry->zeros.reset(std::calloc(room, 1));
  if (!entry->zeros)
    fail(ErrorKind::kIo,
         "[engine] out of memory for " + std::to_string(room) + " bytes of zeros: this rank has joined");
  Byte* memory = static_cast<Byte*>(entry->zeros.get());
  memory += kTensorAlign - reinterpret_cast<uintptr_t>(memory) % kTensorAlign;
  for (const TensorDescription& tensor : name->agreed.tensors) {
    entry->buffers.push_back({memory, memory});
    memory += room_of(tensor);
  }
  ++name->stand_ins;
  return entry;
}

void Negotiation::finish_join(Entries* ready) {
  if (join_entry_ != nullptr) {  // else it was given up meanwhile: the world ends
    join_entry_->description.root = ranks_[last_joined_];
    ready->push_back(join_entry_);
    join_entry_->name->entry = nullptr;
    join_entry_ = nullptr;
    --pending_;
  }
  joined_.assign(joined_.size(), false);
  joined_count_ = 0;
  closing_ = false;
}

}  // namespace perseus

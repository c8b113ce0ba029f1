// Sums by owner, group and name.
#include "compression/accumulation.h"

#include "base/error.h"
#include "base/huge_pages.h"
#include "kernels/kernels.h"

namespace perseus {
namespace {

size_t padded(size_t bytes) {
  constexpr size_t kLine = 64;
  return (bytes + kLine - 1) / kLine * kLine;
}

}  // namespace

Accumulation::Sum::~Sum() {
  if (bytes != nullptr) bytes->fetch_sub(size, std::memory_order_relaxed);
}

std::shared_ptr<Accumulation::Sum> Accumulation::take(uint64_t owner, int group, const char* name) {
  const MutexLock lock(mutex_);
  key_.assign(name);
  key_.append(1, '\0');
  key_.append(reinterpret_cast<const char*>(&owner), sizeof owner);
  key_.append(reinterpret_cast<const char*>(&group), sizeof group);
  std::shared_ptr<Sum>& sum = sums_[key_];
  if (!sum) {
    sum = std::make_shared<Sum>();
    sum->owner = owner;
    sum->group = group;
  }
  if (sum->busy)
    fail(ErrorKind::kInvalidArgument, "[accumulation] two threads submit the gradient '" + std::string(name) +
                                          "' at once: give them different names");
  sum->busy = true;
  return sum;
}

void Accumulation::lay_out(Sum* sum, const char* name, const std::vector<Tensor>& tensors) {
  bool same = sum->layout.size() == tensors.size();
  for (size_t i = 0; same && i < tensors.size(); ++i)
    same = sum->layout[i] == std::make_pair(tensors[i].dtype, tensors[i].count);
  if (same) return;
  if (sum->taken > 0)
    fail(ErrorKind::kInvalidArgument,
         "[accumulation] the gradient '" + std::string(name) + "' has changed its size or dtype after " +
             std::to_string(sum->taken) + " of " + std::to_string(steps_) +
             " steps (PERSEUS_ACCUMULATE_N_STEPS): make a new optimizer, or change it between sums");
  decltype(sum->layout) layout;
  size_t size = 0;
  for (const Tensor& tensor : tensors) {
    layout.emplace_back(tensor.dtype, tensor.count);
    size += padded(tensor.count * kernels::sum_size(tensor.dtype));
  }
  // Not filled with anything: the first step writes it. If there is no memory for it, the old layout stays true.
  sum->data.reset(new Byte[size]);
  sum->layout = std::move(layout);
  advise_huge_pages(sum->data.get(), size);
  bytes_.fetch_add(size - sum->size, std::memory_order_relaxed);
  sum->size = size;
  sum->bytes = &bytes_;
}

bool Accumulation::hold(uint64_t owner, int group, const char* name, const std::vector<Tensor>& tensors) {
  const std::shared_ptr<Sum> sum = take(owner, group, name);
  bool last = false;
  const auto give_back = [&] {
    const MutexLock lock(mutex_);
    sum->busy = false;
  };
  try {
    lay_out(sum.get(), name, tensors);
    last = sum->taken + 1 == steps_;
    Byte* at = sum->data.get();
    for (const Tensor& tensor : tensors) {
      if (sum->taken == 0) kernels::start_sum(tensor.dtype, at, tensor.in, tensor.count);
      else if (!last) kernels::add_to_sum(tensor.dtype, at, tensor.in, tensor.count);
      else kernels::finish_sum(tensor.dtype, tensor.out, at, tensor.in, tensor.count);
      at += padded(tensor.count * kernels::sum_size(tensor.dtype));
    }
  } catch (...) {
    give_back();
    throw;
  }
  sum->taken = last ? 0 : sum->taken + 1;
  give_back();
  return !last;
}

void Accumulation::forget(uint64_t owner) {
  const MutexLock lock(mutex_);
  for (auto it = sums_.begin(); it != sums_.end();) it = it->second->owner == owner ? sums_.erase(it) : std::next(it);
}

void Accumulation::forget_group(int group) {
  const MutexLock lock(mutex_);
  for (auto it = sums_.begin(); it != sums_.end();) it = it->second->group == group ? sums_.erase(it) : std::next(it);
}

}  // namespace perseus

// Records by owner, group and name.
#include "engine/residuals.h"

#include "base/error.h"

namespace perseus {

Residuals::Record::~Record() {
  if (bytes != nullptr) bytes->fetch_sub(2 * begins.back() * sizeof(float), std::memory_order_relaxed);
}

std::shared_ptr<Residuals::Record> Residuals::take(uint64_t owner, int group, const std::string& name,
                                                   const std::vector<size_t>& sizes) {
  std::lock_guard<std::mutex> lock(mutex_);
  key_.assign(name);
  key_.append(1, '\0');
  key_.append(reinterpret_cast<const char*>(&owner), sizeof owner);
  key_.append(reinterpret_cast<const char*>(&group), sizeof group);
  std::shared_ptr<Record>& record = records_[key_];
  bool same = record && record->begins.size() == sizes.size() + 1;
  for (size_t i = 0; same && i < sizes.size(); ++i) same = record->begins[i + 1] - record->begins[i] == sizes[i];
  if (!same) {
    auto made = std::make_shared<Record>();
    made->owner = owner;
    made->begins.assign(1, 0);
    for (size_t size : sizes) made->begins.push_back(made->begins.back() + size);
    const size_t elements = 2 * made->begins.back();
    made->memory.reset(static_cast<float*>(std::calloc(elements, sizeof(float))));
    if (!made->memory) fail(ErrorKind::kIo, "[codec] out of memory for what is held back of '" + name + "'");
    made->bytes = &bytes_;
    bytes_.fetch_add(elements * sizeof(float), std::memory_order_relaxed);
    record = std::move(made);
  }
  ++record->steps;
  return record;
}

void Residuals::forget(uint64_t owner) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = records_.begin(); it != records_.end();)
    it = it->second->owner == owner ? records_.erase(it) : std::next(it);
}

}  // namespace perseus

// Records by owner, group and name.
#include "compression/residuals.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "kernels/float_mode.h"
#include "kernels/kernels.h"

namespace perseus {
namespace {

// The number of a division of tensors among senders. That tensors have other types it says, too: the codec may not
// serve these.
uint64_t division(const CompressionTerms& terms, uint64_t of_chunks, const Residuals::Tensors& tensors) {
  return (terms.codec.kind == CodecKind::kLowRank ? ~of_chunks : of_chunks) ^ tensors.dtypes;
}

// Whether a record belongs to these tensors; a loaded one takes their sizes.
bool fits(Residuals::Record* record, const Residuals::Tensors& tensors) {
  const std::vector<size_t>& sizes = tensors.sizes;
  const bool known = record->shapes != 0 || !record->loaded;
  if (known && record->shapes != tensors.shapes) return false;
  if (record->loaded && record->begins.back() == std::accumulate(sizes.begin(), sizes.end(), size_t{0})) {
    record->begins.assign(1, 0);
    for (size_t size : sizes) record->begins.push_back(record->begins.back() + size);
    return true;
  }
  bool same = record->begins.size() == sizes.size() + 1;
  for (size_t i = 0; same && i < sizes.size(); ++i) same = record->begins[i + 1] - record->begins[i] == sizes[i];
  return same;
}

}  // namespace

Residuals::Record::~Record() {
  const size_t blocks = momenta == nullptr ? 1 : 2;
  if (bytes != nullptr) bytes->fetch_sub(blocks * 2 * begins.back() * sizeof(float), std::memory_order_relaxed);
}

void Residuals::Record::settle() {
  for (size_t i = 0; i < low_rank.size(); ++i) settle(i);
}

void Residuals::Record::step_with(double rate) {
  rate_before = learning_rate;
  carry = 1.0F;
  if (rate == 0 || !std::isfinite(rate)) return;
  if (learning_rate != 0 && std::signbit(rate) != std::signbit(learning_rate)) learning_rate = highest_rate = 0;
  highest_rate = std::max(kForgets * highest_rate, std::abs(rate));
  const double counted = std::copysign(std::max(std::abs(rate), kLeastRate * highest_rate), rate);
  if (learning_rate != 0) carry = static_cast<float>(learning_rate / counted);
  learning_rate = counted;
}

void Residuals::Record::count_by(float new_factor) {
  if (new_factor == 0 || !std::isfinite(new_factor)) return;
  if (factor != 0 && factor != new_factor) {
    settle();
    kernels::ReduceSpec scale;
    scale.postscale = static_cast<double>(factor) / static_cast<double>(new_factor);
    for (float* const sent : {memory.get(), momenta.get()})
      if (const void* const source = sent) kernels::reduce(scale, sent, nullptr, &source, 1, begins.back(), false);
  }
  factor = new_factor;
}

void Residuals::Record::move_to(std::shared_ptr<float[]> elsewhere) {
  std::memcpy(elsewhere.get(), memory.get(), 2 * begins.back() * sizeof(float));
  memory = std::move(elsewhere);
  page_locked = true;
}

void Residuals::Record::join_parts(float factor) {
  const kernels::DefaultFloatMode mode;
  const size_t count = begins.back();
  float *const mine = memory.get(), *const owned = mine + count;
  for (size_t i = 0; i < count; ++i) {
    if (owned[i] == 0.0F) continue;
    if (factor != 0.0F) mine[i] += owned[i] / factor;
    owned[i] = 0.0F;
  }
}

std::shared_ptr<Residuals::Record> Residuals::find(const Key& key) {
  key_.assign(key.name);
  key_.append(1, '\0');
  key_.append(reinterpret_cast<const char*>(&key.owner), sizeof key.owner);
  key_.append(reinterpret_cast<const char*>(&key.group), sizeof key.group);
  const auto found = records_.find(key_);
  return found == records_.end() ? nullptr : found->second;
}

std::shared_ptr<Residuals::Record> Residuals::make(const Key& key, const Tensors& tensors) {
  auto made = std::make_shared<Record>();
  made->owner = key.owner;
  made->group = key.group;
  made->begins.assign(1, 0);
  for (size_t size : tensors.sizes) made->begins.push_back(made->begins.back() + size);
  made->memory = zeros(key.name, 2 * made->begins.back());
  made->bytes = &bytes_;
  return made;
}

std::unique_ptr<float[], Residuals::Record::Free> Residuals::zeros(const std::string& name, size_t count) {
  std::unique_ptr<float[], Record::Free> memory(static_cast<float*>(std::calloc(count, sizeof(float))));
  if (!memory) fail(ErrorKind::kIo, "[codec] out of memory for what is held back of '" + name + "'");
  bytes_.fetch_add(count * sizeof(float), std::memory_order_relaxed);
  return memory;
}

Flush Residuals::due(const Key& key, const Tensors& tensors, const CompressionTerms& terms,
                     const std::function<uint64_t()>& layout, bool* dropped) {
  const MutexLock lock(mutex_);
  *dropped = false;
  const std::shared_ptr<Record> record = find(key);
  if (!record) return Flush::kNone;
  if (!fits(record.get(), tensors)) {
    *dropped = record->holds;
    return Flush::kNone;
  }
  // Tensors of other types may be divided otherwise, or travel without a codec that would take along what is held.
  if (record->dtypes != 0 && record->dtypes != tensors.dtypes)
    return record->holds || record->flushes ? Flush::kAmongAll : Flush::kNone;
  if (record->loaded && record->layout != division(terms, layout(), tensors)) return Flush::kAmongAll;
  // A matrix has one sender, which keeps its vectors; chunks have several, and all ranks say the same, whether they
  // send or not. What a rank has loaded does not have the vectors that others go on with.
  const CompressionTerms& before = record->terms;
  const bool whole = (record->loaded ? terms : before).codec.kind == CodecKind::kLowRank;
  const Flush flush = whole ? Flush::kAmongAll : Flush::kAsDivided;
  if (record->flushes || (whole && record->loaded)) return flush;
  const bool goes_on = record->loaded ? keeps_residual(terms.codec) && !terms.automatic
                                      : before.codec == terms.codec && before.from == terms.from &&
                                            before.doubles == terms.doubles && before.automatic == terms.automatic;
  return goes_on || !record->holds ? Flush::kNone : flush;
}

// Not earlier: a rank that alone has other shapes fails, and its count of steps must stay equal to the others'.
void Residuals::agreed(const Key& key, const Tensors& tensors) {
  const MutexLock lock(mutex_);
  const std::shared_ptr<Record> record = find(key);
  if (record && !fits(record.get(), tensors)) records_.erase(key_);
}

Residuals::Lease Residuals::take(const Key& key, const Tensors& tensors, const CompressionTerms& terms, uint64_t layout,
                                 Flush flush, double learning_rate, float factor) {
  const MutexLock lock(mutex_);
  std::shared_ptr<Record> record = find(key);
  if (record && !fits(record.get(), tensors)) record = nullptr;  // written since agreed()
  if (record) {
    record->step_with(learning_rate);
    record->low_rank.resize(tensors.sizes.size());
    record->count_by(factor);
    if (flush != Flush::kNone) {
      record->settle();
      for (kernels::LowRankMemory& each : record->low_rank) each.q.clear();
    }
  }
  if (flush != Flush::kNone && !keeps_residual(terms.codec)) {
    records_.erase(key_);
    return Lease(record);
  }
  if (!record) {
    records_[key_] = record = make(key, tensors);
    record->step_with(learning_rate);
    record->low_rank.resize(tensors.sizes.size());
    record->count_by(factor);
  }
  record->held.resize(tensors.sizes.size());
  if (flush != Flush::kNone) record->held.assign(tensors.sizes.size(), false);
  record->shapes = tensors.shapes;
  record->dtypes = tensors.dtypes;
  record->terms = terms;
  record->layout = division(terms, layout, tensors);
  record->loaded = false;
  record->holds = flush == Flush::kNone;
  if (!record->holds) record->flushes = false;
  ++record->steps;
  return Lease(record);
}

bool Residuals::holds(const Key& key, size_t tensor) {
  const MutexLock lock(mutex_);
  const std::shared_ptr<Record> record = find(key);
  return record && tensor < record->held.size() && record->held[tensor];
}

void Residuals::give_back(const Lease& lease) {
  const MutexLock lock(mutex_);
  --lease->steps;
  lease->learning_rate = lease->rate_before;
}

bool Residuals::has_momenta(const Key& key) {
  const MutexLock lock(mutex_);
  const std::shared_ptr<Record> record = find(key);
  return record && record->momenta && !record->momenta_spoilt;
}

void Residuals::spoil_momenta() {
  const MutexLock lock(mutex_);
  for (auto& [key, record] : records_) record->momenta_spoilt = true;
}

void Residuals::spoil_momenta(uint64_t owner) {
  const MutexLock lock(mutex_);
  for (auto& [key, record] : records_)
    if (record->owner == owner) record->momenta_spoilt = true;
}

void Residuals::restart_turns(uint32_t group) {
  const MutexLock lock(mutex_);
  for (auto& [key, record] : records_)
    if (record->group == group && record->terms.codec.kind == CodecKind::kRotate) record->steps = 0;
}

void Residuals::begin_momenta(const Lease& lease, const std::string& name, bool anew) {
  const MutexLock lock(mutex_);
  const size_t count = 2 * lease->begins.back();
  if (!lease->momenta) lease->momenta = zeros(name, count);
  else if (anew) std::fill_n(lease->momenta.get(), count, 0.0F);
  lease->momenta_spoilt = false;
}

void Residuals::flush() {
  const MutexLock lock(mutex_);
  for (auto& [key, record] : records_) record->flushes = true;
}

void Residuals::flush(const Key& key) {
  const MutexLock lock(mutex_);
  if (const std::shared_ptr<Record> record = find(key)) record->flushes = true;
}

void Residuals::forget(uint64_t owner) {
  forget_if([owner](const Record& record) { return record.owner == owner; });
}

void Residuals::forget_group(uint32_t group) {
  forget_if([group](const Record& record) { return record.group == group; });
}

template <class Which>
void Residuals::forget_if(const Which& which) {
  const MutexLock lock(mutex_);
  for (auto it = records_.begin(); it != records_.end();) it = which(*it->second) ? records_.erase(it) : std::next(it);
}

size_t Residuals::read(const Key& key, float* data, size_t room, Place* place) {
  const MutexLock lock(mutex_);
  Record* record = idle(key);
  if (record == nullptr || !record->holds) return 0;
  const size_t count = record->begins.back();
  *place = {record->layout, record->shapes, record->factor};
  if (data == nullptr) return count;
  if (room != 2 * count)
    fail(ErrorKind::kInvalidArgument, "[codec] '" + key.name + "' holds back " + std::to_string(2 * count) +
                                          " numbers, not " + std::to_string(room));
  record->settle();
  std::memcpy(data, record->memory.get(), room * sizeof(float));
  return count;
}

void Residuals::write(const Key& key, const float* data, size_t room, const Place& place) {
  const MutexLock lock(mutex_);
  const Record* before = idle(key);
  if (room == 0 || room % 2 != 0)
    fail(ErrorKind::kInvalidArgument, "[codec] '" + key.name + "' cannot hold back " + std::to_string(room) +
                                          " numbers: expected two for each element");
  const uint64_t steps = before == nullptr ? 0 : before->steps;
  const std::shared_ptr<Record> record = records_[key_] = make(key, {{room / 2}});
  std::memcpy(record->memory.get(), data, room * sizeof(float));
  record->steps = steps;
  record->layout = place.layout;
  record->shapes = place.shapes;
  record->factor = place.factor;
  record->holds = record->loaded = true;
}

// The record of a name without an operation under way. Leases begin with mutex_ held, or as copies of others.
Residuals::Record* Residuals::idle(const Key& key) {
  find(key);
  const auto found = records_.find(key_);
  if (found == records_.end()) return nullptr;
  if (found->second->leases.load(std::memory_order_acquire) > 0)
    fail(ErrorKind::kInvalidArgument, "[codec] '" + key.name + "' is under way: wait for its handle first");
  return found->second.get();
}

}  // namespace perseus

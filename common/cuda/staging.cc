// Copies of one request, and the events behind them.
#include "cuda/staging.h"

#include <algorithm>

#include "base/error.h"
#include "cuda/chunk_list.h"

namespace perseus::cuda {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPiece = 4 * 1024 * 1024;
constexpr size_t kWholeChunk = kChunkElements * sizeof(float);
// Copies are not put off any more for so many bytes, or looks.
constexpr size_t kBurst = 1024 * 1024;
constexpr int kMostLooks = 8;

}  // namespace

Staging::~Staging() {
  if (!launched_.load(std::memory_order_acquire)) {
    // Whoever gives it to the driver at this moment still uses it.
    const MutexLock giving(device_.giving()), lock(device_.order());
    std::vector<Staging*>& requests = device_.burst().requests;
    requests.erase(std::remove(requests.begin(), requests.end(), this), requests.end());
  }
  give_back_block();
}

void Staging::give_back_block() {
  if (block_.data == nullptr) return;
  // The last event comes after all copies that use the block.
  std::shared_ptr<const Event> last = stored_;
  if (!last && !marks_.empty()) last = marks_.back().event;
  device_.free(block_, std::move(last), std::move(encoded_));
  block_ = Device::Block();
}

void Staging::add(const void* in, size_t in_bytes, void* out, size_t out_bytes, bool apart) {
  const auto place = [this](size_t bytes) {
    const size_t begin = bytes_;
    bytes_ += (bytes + kLine - 1) / kLine * kLine;
    return begin;
  };
  Tensor tensor{in, out, in_bytes, out_bytes, 0, 0};
  tensor.loads = in == nullptr ? 0 : in_bytes;
  const size_t written = out == nullptr ? 0 : out_bytes;
  tensor.in_at = tensor.out_at = place(apart ? in_bytes : std::max(in_bytes, written));
  if (apart) tensor.out_at = place(written);
  tensors_.push_back(tensor);
}

void Staging::load(Handle stream, bool more_follow) {
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  device_.refuse_capture(stream);
  if (!kept_) block_ = device_.allocate(bytes_);
  size_t bytes = 0;
  for (Tensor& tensor : tensors_) {
    tensor.position = bytes;
    bytes += tensor.loads;
    if (kept_) tensor.loads = tensor.position = 0;
  }
  const Device::Lane lane = device_.lane_of(stream);
  lane_ = lane.number;
  const auto join_burst = [&] {
    const MutexLock lock(device_.order());
    Device::Burst& burst = device_.burst();
    if ((burst.stream != stream || stream == kPerThreadStream) && !burst.requests.empty()) return false;
    // It stands for all that have asked before: the same stream computes theirs.
    driver.check(driver.call().event_record(burst.ready, stream), "cuEventRecord");
    burst.stream = stream;
    burst.to_host = lane.to_host;
    burst.requests.push_back(this);
    burst.bytes += bytes;
    more_follow = more_follow && burst.bytes < kBurst;
    return true;
  };
  while (!join_burst()) launch(&device_);
  if (!more_follow) launch(&device_);
}

void Staging::pass_on(Handle stream) {
  const Device::Current current(device_);
  device_.refuse_capture(stream);
  Copies copies;
  for (const Tensor& tensor : tensors_)
    if (tensor.out != nullptr && tensor.out != tensor.in) copies.add(tensor.out, tensor.in, tensor.in_bytes);
  copies.move(device_, stream);
  launched_.store(true, std::memory_order_release);
  stored_ = device_.record(stream);
}

template <typename Body>
void Staging::attempt(const Body& body) {
  try {
    const Device::Current current(device_);
    body();
  } catch (const std::exception& error) {
    failure_ = error.what();
  }
}

void Staging::stay(bool with_image) {
  kept_ = true;
  encodes_ = false;
  if (with_image && block_.data == nullptr) attempt([this] { block_ = device_.allocate(bytes_); });
}

// Where it has an image, that becomes free once nobody uses it.
bool Staging::stay_encoded() {
  give_back_block();
  size_t bytes = 0;
  for (Tensor& tensor : tensors_) {
    tensor.in_at = tensor.out_at = bytes;
    const size_t chunks = tensor.in_bytes / kWholeChunk, rest = tensor.in_bytes % kWholeChunk;
    bytes += chunks * kSlotBytes + (rest == 0 ? 0 : (rest + kSlotBytes - kWholeChunk + kLine - 1) / kLine * kLine);
  }
  bytes_ = std::max(bytes_, bytes);
  try {
    const Device::Current current(device_);
    block_ = device_.allocate(bytes_);
    encodes_ = true;
  } catch (const Error&) {
    encodes_ = false;
  }
  return encodes_;
}

Byte* Staging::slots(size_t i, size_t begin) const {
  return block_.data + tensors_[i].in_at + begin / kWholeChunk * kSlotBytes;
}

void Staging::wrote(size_t i, size_t bytes) {
  tensors_[i].stored += bytes;
  stores_ = true;
  device_.note_store();
}

void Staging::fetch() {
  if (!kept_) return;
  stay(true);
  kept_ = encodes_ = false;
  if (!failure_.empty()) return;
  attempt([this] {
    Copies copies;
    size_t loads = 0;
    for (Tensor& tensor : tensors_) {
      tensor.loads = tensor.in == nullptr ? 0 : tensor.in_bytes;
      tensor.position = loads;
      for (size_t begin = 0; begin < tensor.loads; begin += kPiece) {
        const size_t bytes = std::min(kPiece, tensor.loads - begin);
        copies.add(block_.data + tensor.in_at + begin, static_cast<const Byte*>(tensor.in) + begin, bytes);
        copies.load(device_.fetching());
        loads += bytes;
        marks_.push_back({loads, device_.record(device_.fetching())});
      }
    }
  });
}

bool Staging::launch_settled(Device* device) {
  {
    const MutexLock lock(device->order());
    Device::Burst& burst = device->burst();
    const bool grows = burst.requests.size() != burst.seen && ++burst.looks < kMostLooks;
    burst.seen = burst.requests.size();
    if (grows) return false;
  }
  launch(device);
  return true;
}

void Staging::launch(Device* device) {
  const MutexLock giving(device->giving());
  Device::Burst& burst = device->given();
  {
    const MutexLock lock(device->order());
    if (device->burst().requests.empty()) return;
    std::swap(burst, device->burst());
  }
  std::string failure;
  try {
    const Device::Current current(*device);
    give(device, &burst);
  } catch (const std::exception& error) {
    // Each of them says so to whoever waits for it; one that asks later may fail by itself.
    failure = error.what();
    burst.copies.clear();
  }
  for (Staging* request : burst.requests) {
    request->failure_ = failure;
    request->launched_.store(true, std::memory_order_release);
  }
  burst.requests.clear();
  burst.bytes = burst.seen = 0;
  burst.looks = 0;
}

// The copies of a burst, and an event behind every piece of them.
void Staging::give(Device* device, Device::Burst* burst) {
  const Driver& driver = Driver::get();
  driver.check(driver.call().stream_wait(burst->to_host, burst->ready, 0), "cuStreamWaitEvent");
  struct Touched {
    Staging* request;
    size_t end;
  };
  std::vector<Touched> touched;  // since the last event
  const auto mark = [&] {
    burst->copies.load(burst->to_host);
    const std::shared_ptr<const Event> event = device->record(burst->to_host);
    for (const Touched& each : touched) each.request->marks_.push_back({each.end, event});
    touched.clear();
  };
  for (Staging* request : burst->requests) {
    touched.push_back({request, 0});
    for (const Tensor& tensor : request->tensors_)
      for (size_t begin = 0; begin < tensor.loads; begin += kPiece) {
        const size_t bytes = std::min(kPiece, tensor.loads - begin);
        if (burst->copies.bytes() + bytes > kPiece) mark();
        burst->copies.add(request->block_.data + tensor.in_at + begin, static_cast<const Byte*>(tensor.in) + begin,
                          bytes);
        if (touched.empty()) touched.push_back({request, 0});
        touched.back().end = tensor.position + begin + bytes;
      }
  }
  if (!touched.empty()) mark();
}

bool Staging::reached(size_t position) const {
  if (!launched_.load(std::memory_order_acquire)) return false;
  if (!failure_.empty()) fail(ErrorKind::kIo, failure_);
  if (happened_ > 0 && marks_[happened_ - 1].end >= position) return true;
  while (happened_ < marks_.size()) {
    if (!marks_[happened_].event->poll()) return false;
    if (marks_[happened_++].end >= position) return true;
  }
  return true;
}

void Staging::wait_until_loaded() const {
  launch(&device_);
  if (!failure_.empty()) fail(ErrorKind::kIo, failure_);
  marks_.back().event->wait();
}

void Staging::store(size_t i, size_t begin, size_t bytes, Copies* copies) {
  Tensor& tensor = tensors_[i];
  if (tensor.out == nullptr || bytes == 0) return;
  copies->add(static_cast<Byte*>(tensor.out) + begin, block_.data + tensor.out_at + begin, bytes);
  wrote(i, bytes);
}

void Staging::end(bool wholly) {
  Copies copies;
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (wholly && !kept_ && tensors_[i].stored == 0) store(i, 0, tensors_[i].out_bytes, &copies);
  if (!stores_) return;
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  copies.store(device_.to_device());
  // After a failure, parts may still be loading: the block is free once both are over.
  if (happened_ < marks_.size()) {
    driver.check(driver.call().stream_wait(device_.to_device(), marks_.back().event->handle(), 0), "cuStreamWaitEvent");
    device_.note_store();
  }
  stored_ = device_.stored();
}

void Staging::join(Handle stream) const {
  if (!stored_ || stored_->happened()) return;
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  device_.refuse_capture(stream);
  driver.check(driver.call().stream_wait(stream, stored_->handle(), 0), "cuStreamWaitEvent");
}

void Images::add(const Staging& staging, size_t tensor, size_t begin, size_t bytes) {
  device_ = &staging.of();
  const bool has_image = staging.has_image();
  const Place place{staging.device_in(tensor) + begin, staging.device_out(tensor) + begin, has_image};
  const Byte* const in = has_image ? staging.in(tensor) + begin : place.in;
  const Byte* const out = has_image ? staging.out(tensor) + begin : place.out;
  parts_.push_back({in, bytes, place});
  if (out != in) parts_.push_back({out, bytes, place});
}

void Images::sort() {
  std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) { return a.image < b.image; });
}

Images::Place Images::at(const Byte* image) const {
  auto part = std::upper_bound(parts_.begin(), parts_.end(), image,
                               [](const Byte* address, const Part& each) { return address < each.image; });
  // Mostly the first; inputs may overlap.
  while (part != parts_.begin()) {
    --part;
    const size_t offset = static_cast<size_t>(image - part->image);
    if (offset < part->bytes) return {part->place.in + offset, part->place.out + offset, part->place.has_image};
  }
  fail(ErrorKind::kInternal, "[cuda] an address is in no image");
}

}  // namespace perseus::cuda

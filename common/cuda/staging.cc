// Copies of one request, and the events behind them.
#include "cuda/staging.h"

#include <algorithm>

#include "base/error.h"

namespace perseus::cuda {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPiece = 4 * 1024 * 1024;
constexpr const char* kWorkBefore = "the work on a GPU's stream before a tensor was copied";

Address address_of(const void* pointer) { return static_cast<Address>(reinterpret_cast<uintptr_t>(pointer)); }

}  // namespace

Staging::~Staging() {
  // The last event comes after all copies that use the block.
  Handle last = stored_;
  if (last == nullptr && !marks_.empty()) {
    last = marks_.back().event;
    marks_.pop_back();
  }
  for (const Mark& mark : marks_) device_.give_event(mark.event);
  if (block_.data != nullptr) device_.free(block_, last);
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

// The legacy stream answers with an error while a stream that it waits for is captured.
void Staging::refuse_capture(Handle stream) const {
  constexpr Result kImplicitCapture = 906;
  const Driver& driver = Driver::get();
  int capturing = 0;
  const Result result = driver.call().stream_is_capturing(stream, &capturing);
  if (result != kImplicitCapture) driver.check(result, "cuStreamIsCapturing");
  if (capturing != 0 || result == kImplicitCapture)
    fail(ErrorKind::kInvalidArgument,
         "[cuda] this stream is being captured into a CUDA graph, which cannot hold an exchange between ranks: capture "
         "the forward and backward passes alone");
}

void Staging::load(Handle stream) {
  const Driver& driver = Driver::get();
  const Functions& call = driver.call();
  const Device::Current current(device_);
  refuse_capture(stream);
  block_ = device_.allocate(bytes_);
  const MutexLock lock(device_.order());
  const Handle ready = device_.take_event();
  driver.check(call.event_record(ready, stream), "cuEventRecord");
  driver.check(call.stream_wait(device_.to_host(), ready, 0), "cuStreamWaitEvent");
  device_.give_event(ready);  // the wait has taken the event's state, so it may be recorded again
  size_t position = 0, marked = 0;
  for (Tensor& tensor : tensors_) {
    tensor.position = position;
    for (size_t begin = 0; begin < tensor.loads; begin += kPiece) {
      const size_t bytes = std::min(kPiece, tensor.loads - begin);
      driver.check(call.copy_to_host(block_.data + tensor.in_at + begin, address_of(tensor.in) + begin, bytes,
                                     device_.to_host()),
                   "cuMemcpyDtoHAsync");
      position += bytes;
      if (position - marked >= kPiece) mark(marked = position);
    }
  }
  if (position > marked || marks_.empty()) mark(position);
}

void Staging::mark(size_t end) {
  marks_.push_back({end, device_.take_event()});
  const Driver& driver = Driver::get();
  driver.check(driver.call().event_record(marks_.back().event, device_.to_host()), "cuEventRecord");
}

bool Staging::reached(size_t position) const {
  if (happened_ > 0 && marks_[happened_ - 1].end >= position) return true;
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  while (happened_ < marks_.size()) {
    const Result result = driver.call().event_query(marks_[happened_].event);
    if (result == kNotReady) return false;
    driver.check(result, kWorkBefore);
    if (marks_[happened_++].end >= position) return true;
  }
  return true;
}

void Staging::wait_until_loaded() const {
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  driver.check(driver.call().event_synchronize(marks_.back().event), kWorkBefore);
}

void Staging::store(size_t i, size_t begin, size_t bytes) {
  Tensor& tensor = tensors_[i];
  if (tensor.out == nullptr || bytes == 0) return;
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  driver.check(driver.call().copy_to_device(address_of(tensor.out) + begin, block_.data + tensor.out_at + begin, bytes,
                                            device_.to_device()),
               "cuMemcpyHtoDAsync");
  tensor.stored += bytes;
  stores_ = true;
}

void Staging::end(bool wholly) {
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (wholly && tensors_[i].stored == 0) store(i, 0, tensors_[i].out_bytes);
  if (!stores_) return;
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  // After a failure, parts may still be loading: the block is free once both are over.
  driver.check(driver.call().stream_wait(device_.to_device(), marks_.back().event, 0), "cuStreamWaitEvent");
  stored_ = device_.take_event();
  driver.check(driver.call().event_record(stored_, device_.to_device()), "cuEventRecord");
}

void Staging::join(Handle stream) const {
  if (stored_ == nullptr) return;
  const Driver& driver = Driver::get();
  const Device::Current current(device_);
  refuse_capture(stream);
  driver.check(driver.call().stream_wait(stream, stored_, 0), "cuStreamWaitEvent");
}

}  // namespace perseus::cuda

// Launches of the kernels for chunks.
#include "cuda/encoding.h"

#include <algorithm>

namespace perseus::cuda {
namespace {

uint64_t address_of(const void* pointer) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer)); }

size_t shares_of(uint32_t count) { return (size_t{count} + kChunkElements - 1) / kChunkElements * kSharesInChunk; }

}  // namespace

void Encoding::start(ChunkForm form, float scale) {
  clear();
  form_ = form;
  scale_ = scale;
}

void Encoding::add(Staging* staging, size_t tensor, size_t begin, size_t bytes, float* residual,
                   std::shared_ptr<const void> owner, float carry) {
  Device* const device = &staging->of();
  auto part = std::find_if(parts_.begin(), parts_.end(),
                           [device](const std::unique_ptr<Part>& each) { return each->device == device; });
  if (part == parts_.end()) {
    part = parts_.insert(parts_.end(), std::make_unique<Part>());
    (*part)->device = device;
  }
  Run run{staging, tensor, bytes, ChunkRun(), address_of(staging->device_out(tensor) + begin), std::move(owner)};
  run.chunks.x = address_of(staging->device_in(tensor) + begin);
  run.chunks.residual = address_of(residual);
  run.chunks.slots = address_of(staging->slots(tensor, begin));
  run.chunks.count = static_cast<uint32_t>(bytes / sizeof(float));
  run.chunks.carry = carry;
  (*part)->runs.push_back(std::move(run));
}

bool Encoding::encoded() {
  if (!begun_) {
    begun_ = true;
    for (const std::unique_ptr<Part>& part : parts_) {
      Device& device = *part->device;
      const Device::Current current(device);
      const bool halves = form_ == ChunkForm::kFloat16 || form_ == ChunkForm::kBFloat16;
      if (form_ == ChunkForm::kFloat16 && scale_ == 0)
        launch(*part, {Kernel::kLargest, Kernel::kEncodeHalves}, device.fetching(), false);
      else launch(*part, {halves ? Kernel::kEncodeHalves : Kernel::kEncodeIntegers}, device.fetching(), false);
      part->encoded = device.record(device.fetching());
      for (const Run& run : part->runs) run.staging->note_encoding(part->encoded);
    }
  }
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const std::unique_ptr<Part>& part) { return part->encoded->poll(); });
}

void Encoding::decode() {
  for (const std::unique_ptr<Part>& part : parts_) {
    const Device::Current current(*part->device);
    for (const Run& run : part->runs) run.staging->wrote(run.tensor, run.bytes);
    launch(*part, {Kernel::kDecode}, part->device->to_device(), true);
  }
}

void Encoding::launch(const Part& part, std::initializer_list<Kernel> kernels, Handle stream, bool to_tensors) const {
  ChunkList list;
  list.count = list.unused = 0;
  list.form = form_;
  list.scale = scale_;
  uint32_t shares = 0;
  const auto flush = [&] {
    if (shares == 0) return;
    for (const Kernel kernel : kernels) part.device->launch(kernel, shares / kSharesInBlock, &list, stream);
    list.count = shares = 0;
  };
  for (const Run& run : part.runs) {
    ChunkRun& chunks = list.runs[list.count++] = run.chunks;
    if (to_tensors) chunks.x = run.out;
    chunks.first_share = shares;
    chunks.unused = 0;
    shares += static_cast<uint32_t>(shares_of(chunks.count));
    if (list.count == ChunkList::kMost) flush();
  }
  flush();
}

void Encoding::clear() {
  for (const std::unique_ptr<Part>& part : parts_)
    for (Run& run : part->runs)
      if (part->encoded && run.owner) part->device->keep(std::move(run.owner), part->encoded);
  parts_.clear();
  begun_ = false;
}

}  // namespace perseus::cuda

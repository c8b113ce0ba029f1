// Launches of the kernels for chunks.
#include "cuda/encoding.h"

#include <algorithm>

namespace perseus::cuda {
namespace {

uint64_t address_of(const void* pointer) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer)); }

size_t shares_of(uint32_t count) { return (size_t{count} + kChunkElements - 1) / kChunkElements * kSharesInChunk; }

Kernel encodes(ChunkForm form) {
  switch (form) {
    case ChunkForm::kFloat16:
    case ChunkForm::kBFloat16:
      return Kernel::kEncodeHalves;
    case ChunkForm::kTopK:
    case ChunkForm::kTopKHalves:
      return Kernel::kAccumulate;
    default:
      return Kernel::kEncodeIntegers;
  }
}

}  // namespace

void Encoding::start(ChunkForm form, float scale) {
  clear();
  form_ = form;
  scale_ = scale;
}

void Encoding::add(Part part) {
  Staging* const staging = part.staging;
  Device* const device = &staging->of();
  auto found = std::find_if(devices_.begin(), devices_.end(),
                            [device](const std::unique_ptr<OfDevice>& each) { return each->device == device; });
  if (found == devices_.end()) {
    found = devices_.insert(devices_.end(), std::make_unique<OfDevice>());
    (*found)->device = device;
  }
  const Byte* const out = staging->device_out(part.tensor) + part.begin;
  const Byte* const in = staging->device_in(part.tensor) + part.begin;
  Run run{staging, part.tensor, part.bytes, ChunkRun(), address_of(out), std::move(part.owner)};
  run.chunks.x = address_of(part.summed ? out : in);
  run.chunks.residual = address_of(part.residual);
  run.chunks.slots = address_of(staging->slots(part.tensor, part.begin));
  run.chunks.count = static_cast<uint32_t>(part.bytes / sizeof(float));
  run.chunks.carry = part.carry;
  (*found)->runs.push_back(std::move(run));
}

bool Encoding::encoded() {
  if (!begun_) {
    begun_ = true;
    for (const std::unique_ptr<OfDevice>& part : devices_) {
      Device& device = *part->device;
      const Device::Current current(device);
      if (form_ == ChunkForm::kFloat16 && scale_ == 0)
        launch(*part, {Kernel::kLargest, Kernel::kEncodeHalves}, device.fetching(), false);
      else launch(*part, {encodes(form_)}, device.fetching(), false);
      part->encoded = device.record(device.fetching());
      for (const Run& run : part->runs) run.staging->note_encoding(part->encoded);
    }
  }
  return std::all_of(devices_.begin(), devices_.end(),
                     [](const std::unique_ptr<OfDevice>& part) { return part->encoded->poll(); });
}

void Encoding::decode() {
  for (const std::unique_ptr<OfDevice>& part : devices_) {
    const Device::Current current(*part->device);
    for (const Run& run : part->runs) run.staging->wrote(run.tensor, run.bytes);
    launch(*part, {Kernel::kDecode}, part->device->to_device(), true);
  }
}

void Encoding::launch(const OfDevice& part, std::initializer_list<Kernel> kernels, Handle stream,
                      bool to_tensors) const {
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
  for (const std::unique_ptr<OfDevice>& part : devices_)
    for (Run& run : part->runs)
      if (part->encoded && run.owner) part->device->keep(std::move(run.owner), part->encoded);
  devices_.clear();
  begun_ = false;
}

}  // namespace perseus::cuda

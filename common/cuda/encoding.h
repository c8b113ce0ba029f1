// What devices encode of one bucket's tensors, for an exchange between hosts, and decode of its results. Encoded chunks
// lie in slots of page-locked memory (Staging::stay_encoded), with the bytes that the CPU's codecs give them: so ranks
// whose tensors are on a CPU take part, and who owns a chunk sums it on its CPU. Belongs to one thread at a time.
#pragma once

#include <memory>
#include <vector>

#include "cuda/chunk_list.h"
#include "cuda/device.h"
#include "cuda/staging.h"

namespace perseus::cuda {

class Encoding {
 public:
  Encoding() = default;
  ~Encoding() { clear(); }
  Encoding(const Encoding&) = delete;
  Encoding& operator=(const Encoding&) = delete;

  // Begins anew. `scale`: of float16, 0 = of each chunk's own.
  void start(ChunkForm form, float scale);
  // Whole chunks of a tensor, but for its end.
  struct Part {
    Staging* staging = nullptr;
    size_t tensor = 0, begin = 0, bytes = 0;
    bool summed = false;  // what is encoded lies where the result goes
    // Of its elements, in page-locked memory that belongs to `owner`, where the form is one of integers or of top-k.
    float* residual = nullptr;
    std::shared_ptr<const void> owner;
    float carry = 1.0F;  // what the residual is multiplied by first
  };
  void add(Part part);
  bool empty() const { return devices_.empty(); }
  // Is everything in the slots? Devices begin with the first call, when what they encode has been computed. Of top-k
  // the residuals then have everything, and a slot the largest magnitude of each kWireShare elements of its chunk.
  // Throws Error(kIo) where a device has failed.
  bool encoded();
  // Instead of them, the slots have results, which devices decode into the tensors.
  void decode();
  // What may still be encoded keeps its slots and residuals until then.
  void clear();

 private:
  struct Run {
    Staging* staging;
    size_t tensor, bytes;
    ChunkRun chunks;
    uint64_t out;
    std::shared_ptr<const void> owner;  // of the residual
  };
  // What one device does.
  struct OfDevice {
    Device* device;
    std::vector<Run> runs;
    std::shared_ptr<const Event> encoded;
  };
  void launch(const OfDevice& part, std::initializer_list<Kernel> kernels, Handle stream, bool to_tensors) const;

  ChunkForm form_ = ChunkForm::kFloat16;
  float scale_ = 0;
  bool begun_ = false;
  std::vector<std::unique_ptr<OfDevice>> devices_;
};

}  // namespace perseus::cuda

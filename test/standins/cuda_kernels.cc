// The kernels of common/cuda/*.cu for the stand-in's streams: compiled for the host, where the threads of a grid
// take turns, in an order that kernels must not count on.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_driver.h"

namespace {

// The memory that stands for so many bytes of a device's, or page-locked memory of the host; a kernel that leaves what
// was allocated ends the process.
void* translated(uint64_t address, uint64_t bytes) {
  void* const memory = standin_kernel_memory(address, bytes);
  if (bytes > 0 && memory == nullptr) std::abort();
  return memory;
}

struct Position {
  unsigned x, y, z;
};
thread_local Position blockIdx, threadIdx;
struct uint4 {
  unsigned x, y, z, w;
};

}  // namespace

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)
#define PERSEUS_TRANSLATED translated
#include "cuda/chunk_kernels.cu"
#include "cuda/kernels.cu"

namespace {

enum Code { kSuccess = 0, kInvalidValue = 1, kInvalidPtx = 218, kNotFound = 500 };

struct Kernel {
  const char* name;
  size_t parameter_bytes;
  void (*run)(const void* parameters);
};
template <void (*kKernel)(ChunkList)>
void on_chunks(const void* list) {
  kKernel(*static_cast<const ChunkList*>(list));
}
Kernel kernels[] = {
    {"perseus_copy", sizeof(CopyList), [](const void* list) { perseus_copy(*static_cast<const CopyList*>(list)); }},
    {"perseus_largest", sizeof(ChunkList), on_chunks<perseus_largest>},
    {"perseus_encode_halves", sizeof(ChunkList), on_chunks<perseus_encode_halves>},
    {"perseus_encode_integers", sizeof(ChunkList), on_chunks<perseus_encode_integers>},
    {"perseus_accumulate", sizeof(ChunkList), on_chunks<perseus_accumulate>},
    {"perseus_decode", sizeof(ChunkList), on_chunks<perseus_decode>}};

std::atomic<int> chunk_launches{0};

struct Launch {
  const Kernel* kernel;
  unsigned blocks, threads;
  std::vector<unsigned char> parameters;
};

void run(void* argument) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(argument));
  static thread_local std::minstd_rand random;
  std::vector<unsigned> order(launch->blocks);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random);
  for (const unsigned block : order)
    for (unsigned thread = 0; thread < launch->threads; ++thread) {
      blockIdx = {block, 0, 0};
      threadIdx = {thread, 0, 0};
      launch->kernel->run(launch->parameters.data());
    }
}

}  // namespace

extern "C" {

int standin_chunk_launches() { return chunk_launches; }

int cuModuleLoadData(void** module, const void* image) {
  static int loaded;
  if (std::getenv("STANDIN_CUDA_NO_KERNELS") != nullptr) return kInvalidPtx;
  *module = &loaded;
  return std::strstr(static_cast<const char*>(image), ".version") == nullptr ? kInvalidPtx : kSuccess;
}

int cuModuleUnload(void*) { return kSuccess; }

int cuModuleGetFunction(void** function, void*, const char* name) {
  for (Kernel& kernel : kernels)
    if (std::strcmp(kernel.name, name) == 0) {
      *function = &kernel;
      return kSuccess;
    }
  return kNotFound;
}

int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned, void* stream, void** parameters, void** extra) {
  constexpr unsigned kMostThreads = 1024;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > kMostThreads || block_y != 1 ||
      block_z != 1 || extra != nullptr)
    return kInvalidValue;
  standin_note_call();
  const Kernel* const kernel = static_cast<const Kernel*>(function);
  const bool encodes = std::strncmp(kernel->name, "perseus_encode", std::strlen("perseus_encode")) == 0 ||
                       std::strcmp(kernel->name, "perseus_accumulate") == 0;
  if (encodes && static_cast<const ChunkList*>(parameters[0])->count > 0) ++chunk_launches;
  auto launch = std::make_unique<Launch>();
  launch->kernel = kernel;
  launch->blocks = grid_x;
  launch->threads = block_x;
  const unsigned char* const first = static_cast<const unsigned char*>(parameters[0]);
  launch->parameters.assign(first, first + launch->kernel->parameter_bytes);
  const int code = cuLaunchHostFunc(stream, run, launch.get());
  if (code == kSuccess) launch.release();
  return code;
}

}  // extern "C"

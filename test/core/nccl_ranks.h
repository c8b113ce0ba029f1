// Ranks whose GPUs NCCL joins, on stand-ins for the driver and for NCCL: hosts of them, and gradients that they reduce.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "gpu.h"
#include "nccl.h"

namespace perseus_test {

inline const Medium kOneHost{"shm", "shm"};

// Four ranks as two hosts of two.
inline WorldOptions hosts_of_two(std::vector<std::string> more = {}) {
  WorldOptions options;
  options.overrides = std::move(more);
  options.overrides.insert(options.overrides.end(), {"LIGHT_2D_ALLREDUCE=1", "LIGHT_INTRA_SIZE=2"});
  return options;
}

// What ranks do in `body` with NCCL, and how many collectives NCCL did for it.
inline int with_nccl(const Medium& medium, int ranks, const std::function<void(int, perseus_context*)>& body,
                     const WorldOptions& options = {}) {
  const int before = standin_nccl_calls();
  run_world(medium, ranks, body, options);
  EXPECT_EQ(standin_nccl_communicators(), 0) << "a communicator is left";
  return standin_nccl_calls() - before;
}

// Gradients of two steps, as every rank ends up with them.
struct Training {
  std::vector<Bytes> results;  // by rank
  int nccl_calls = 0;
};

// `together`: tensors of a request.
inline Training train(int ranks, const std::vector<int64_t>& counts, const WorldOptions& options, int steps = 3,
                      perseus_dtype dtype = PERSEUS_FLOAT32, size_t together = 1) {
  Training training;
  training.results.resize(static_cast<size_t>(ranks));
  training.nccl_calls = with_nccl(
      kOneHost, ranks,
      [&](int rank, perseus_context* context) {
        Gpu gpu(rank);
        std::deque<DeviceArray> gradients;
        for (int64_t count : counts) gradients.emplace_back(static_cast<size_t>(count) * size_of(dtype));
        Bytes& results = training.results[static_cast<size_t>(rank)];
        for (int step = 0; step < steps; ++step) {
          std::vector<perseus_handle> handles;
          std::vector<perseus_tensor> tensors;
          for (size_t i = 0; i < counts.size(); ++i) {
            Bytes values(gradients[i].bytes());
            fill(dtype, 31 * i + static_cast<uint64_t>(step), rank, 0, counts[i], values.data());
            DeviceArray& gradient = gradients[i];
            gpu.launch([&gradient, values] { std::memcpy(gradient.view(), values.data(), gradient.bytes()); });
            tensors.push_back({gradient.pointer(), gradient.pointer(), &counts[i], 1, dtype});
          }
          for (size_t i = 0; i < counts.size(); i += together) {
            const std::string name = "gradient" + std::to_string(i);
            const size_t more = std::min(together, counts.size() - i);
            perseus_request request = request_of(PERSEUS_ALLREDUCE, name.c_str(), &tensors[i], static_cast<int>(more));
            request.gradient_of = 1;
            request.memory = PERSEUS_CUDA;
            request.device = gpu.device();
            request.stream = gpu.stream();
            const Outcome outcome = submit(context, request, &handles.emplace_back());
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
          }
          for (const perseus_handle handle : handles) {
            const Outcome outcome = wait(context, handle);
            ASSERT_EQ(outcome.code, PERSEUS_OK) << outcome.message;
            ASSERT_EQ(perseus_handle_join(context, handle, gpu.stream()), PERSEUS_OK);
            EXPECT_EQ(perseus_handle_release(context, handle), PERSEUS_OK);
          }
          for (size_t i = 0; i < counts.size(); ++i) {
            gpu.launch([&] {
              const unsigned char* values = gradients[i].view();
              results.insert(results.end(), values, values + gradients[i].bytes());
            });
            gpu.synchronize();
          }
        }
      },
      options);
  return training;
}

}  // namespace perseus_test

// What an allreduce costs by each algorithm on a given network, and which one is to be used. Pure functions; equal
// input gives the same choice on all ranks. docs/algorithms.md has the arithmetic.
#pragma once

#include <optional>

#include "topology/algorithm.h"

namespace perseus {

// Between any two members, all in seconds.
struct LinkCost {
  double latency = 0;      // until a small message that has been sent is there
  double message = 0;      // of a core, for sending and receiving one
  double byte = 0;         // on the wire, one direction
  double memory_byte = 0;  // reading or writing one while reducing
};
// Measured (docs/algorithms.md): through sockets, on an ordinary network; inside one host.
constexpr LinkCost kTcpCost{30e-6, 8e-6, 0.8e-9, 0.1e-9};
constexpr LinkCost kSharedMemoryCost{1e-6, 0.3e-6, 0.03e-9, 0.03e-9};

// Pairwise: does every member send all it has to every other, which takes one latency instead of two?
bool everyone_reduces(size_t bytes, int members);

double allreduce_cost(Algorithm algorithm, int members, size_t bytes, const LinkCost& link);

// Which algorithm reduces tensors, and buckets of them: `wanted`, or where there is none the cheapest by cost. Never a
// ring unless wanted.
class AlgorithmChoice {
 public:
  explicit AlgorithmChoice(std::optional<Algorithm> wanted = std::nullopt) : wanted_(wanted) {}

  const std::optional<Algorithm>& wanted() const { return wanted_; }
  // Decides about the bits of a tensor, so by nothing but the tensor: pairwise, in rank order, or in a tree.
  Algorithm of_tensor(int members, size_t bytes, const LinkCost& link) const;
  // Of a bucket of tensors with that choice: the cheapest of those that give the same bits.
  Algorithm of_bucket(Algorithm of_tensors, int members, size_t bytes, const LinkCost& link) const;

 private:
  std::optional<Algorithm> wanted_;
};

}  // namespace perseus

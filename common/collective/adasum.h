// Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021) of one or more tensors,
// for any number of ranks: vectors are combined two by two, in rank order, by
//   a' = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b
// until one is left; one without a partner goes on as it is. Parallel vectors are averaged, orthogonal ones added.
//
// As a sequence of exchanges: every rank first receives its part of everybody's tensors; each level of the tree needs
// an allreduce of three numbers per pair and tensor; at the end the parts are gathered. So 2 (N - 1) / N of the bytes
// move, and one copy of the tensors is staged. All ranks end with the same bits.
#pragma once

#include <memory>
#include <vector>

#include "base/progress_lock.h"
#include "collective/staged.h"

namespace perseus {

class Adasum final : public Staged {
 public:
  // Of float16, bfloat16, float32 or float64 tensors. What is combined is prescale * x, what comes out postscale * x.
  Adasum(int ranks, int me, DType dtype, double prescale, double postscale);
  ~Adasum() override;

  // Before the first next(); may be in place.
  void add_tensor(const Piece& piece) PERSEUS_REQUIRES(progress_lock) { pieces_.push_back(piece); }
  bool next(Step* step) override PERSEUS_REQUIRES(progress_lock);
  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override
      PERSEUS_REQUIRES(progress_lock);

 private:
  enum class Stage { kScatter, kCombine, kGather, kDone };
  class Vectors;
  template <typename Format>
  class VectorsOf;
  // Elements of our part that belong to one tensor.
  struct Segment {
    size_t begin, end, tensor;
  };

  static std::unique_ptr<Vectors> make_vectors(DType dtype);
  void scatter();
  void find_segments();
  bool combine();
  void gather();
  void write_outputs();

  const int ranks_, me_;
  const DType dtype_;
  const double prescale_, postscale_;
  std::vector<Piece> pieces_, ordered_;  // as they came, and cut into the parts of all ranks in turn
  Stage stage_ = Stage::kScatter;
  ExchangePlan plan_;
  std::vector<size_t> parts_;  // bytes of every rank's part of all tensors together
  std::vector<Segment> segments_;
  std::vector<double> dots_;  // a·b, |a|², |b|² by pair and tensor
  std::vector<Byte> received_, part_;
  std::unique_ptr<Vectors> vectors_;
};

}  // namespace perseus

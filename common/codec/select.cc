// Selection by bisection on magnitudes. Thread-safe.
#include "codec/select.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "collective/wire_format.h"
#include "kernels/codec_kernels.h"

namespace perseus {
namespace {

struct Window {
  size_t least, most;
};

// A magnitude that between `least` and `most` elements reach, by count_at_least(magnitude). Where there is none because
// many are equal, theirs; where fewer are not zero, 1. Fewer than `least` reach `above`.
template <class Count>
uint32_t threshold(const Count& count_at_least, uint32_t above, Window window) {
  uint32_t low = 1, high = std::max<uint32_t>(above, 1);
  if (count_at_least(low) <= window.most) return low;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const size_t found = count_at_least(middle);
    if (found >= window.least && found <= window.most) return middle;
    (found > window.most ? low : high) = middle;
  }
  return low;
}

// Of a chunk and of a slice; lines of the cache, whole.
constexpr size_t kSample = 1024, kLargestSample = 16 * kSample, kPiece = 16;

uint32_t magnitude_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffff;
}

class Selection {
 public:
  Selection(SelectFrom* chunks, size_t n, ThreadPool* threads, std::vector<uint16_t>* indices)
      : chunks_(chunks), n_(n), threads_(*threads), indices_(indices), first_(indices->size()) {
    for (size_t i = 0; i < n; ++i) count_ += chunks[i].count;
  }

  void run(size_t k, uint32_t largest) {
    const Window window{k, k + k / 4};
    const auto count_all = [this](uint32_t magnitude) { return count_at_least(magnitude); };
    uint32_t magnitude = largest + 1;
    // Counting a sample and finding too many costs less than counting everything.
    if (count_ > 2 * kSample) {
      for (double spreads : {1.5, 4.5}) {
        find(magnitude = sampled_threshold(k, largest, spreads));
        if (found_.size() >= window.least || magnitude == 1) break;
      }
    }
    if (found_.size() < window.least && magnitude > 1) find(threshold(count_all, magnitude, window));
    if (found_.size() <= window.most) return;
    const auto count_found = [this](uint32_t least) {
      return kernels::count_at_least(found_.data(), found_.size(), least);
    };
    magnitude = threshold(count_found, largest + 1, window);
    // Everything that reaches it, or too many equal ones.
    const size_t reached = count_found(magnitude);
    trim(magnitude, reached <= window.most ? reached : window.least);
  }

 private:
  size_t count_at_least(uint32_t magnitude) const {
    std::atomic<size_t> found{0};
    threads_.for_parts(n_, count_, [&](size_t begin, size_t end, size_t) {
      size_t here = 0;
      for (size_t i = begin; i < end; ++i) here += kernels::count_at_least(chunks_[i].v, chunks_[i].count, magnitude);
      found += here;
    });
    return found;
  }

  // A threshold that k elements reach, so likely as the number of the sample's standard deviations says, and not many
  // more. Every chunk's part of the sample is as its part of the elements.
  uint32_t sampled_threshold(size_t k, uint32_t largest, double spreads) {
    const double elements = static_cast<double>(count_),
                 part = std::min(1.0, static_cast<double>(std::min(n_ * kSample, kLargestSample)) / elements);
    found_.clear();
    found_.reserve(kLargestSample);
    for (size_t i = 0; i < n_; ++i) {
      const SelectFrom& chunk = chunks_[i];
      if (chunk.count <= kPiece) continue;
      // Evenly apart, both ends included.
      const auto pieces = std::max(size_t{1}, static_cast<size_t>(part * static_cast<double>(chunk.count / kPiece)));
      for (size_t piece = 0; piece < pieces; ++piece) {
        const float* from = chunk.v + piece * (chunk.count - kPiece) / std::max(pieces - 1, size_t{1});
        found_.insert(found_.end(), from, from + kPiece);
      }
    }
    const double expected = static_cast<double>(k) * static_cast<double>(found_.size()) / elements;
    const double spread = std::sqrt(expected);
    const Window window{static_cast<size_t>(expected + spreads * spread + 1),
                        static_cast<size_t>(expected + (spreads + 1.5) * spread + 4)};
    return threshold(
        [this](uint32_t magnitude) { return kernels::count_at_least(found_.data(), found_.size(), magnitude); },
        largest + 1, window);
  }

  // Takes everything that reaches the magnitude.
  void find(uint32_t magnitude) {
    indices_->resize(first_);
    found_.clear();
    const size_t tasks = std::min(threads_.tasks_for(count_), n_);
    if (tasks <= 1) return find(magnitude, 0, n_, indices_, &found_);
    parts_.resize(tasks);
    threads_.parallel_for(tasks, [&](size_t task, size_t) {
      Part& part = parts_[task];
      part.indices.clear();
      part.values.clear();
      find(magnitude, task * n_ / tasks, (task + 1) * n_ / tasks, &part.indices, &part.values);
    });
    for (const Part& part : parts_) {
      indices_->insert(indices_->end(), part.indices.begin(), part.indices.end());
      found_.insert(found_.end(), part.values.begin(), part.values.end());
    }
  }

  // Appends those of some chunks.
  void find(uint32_t magnitude, size_t begin, size_t end, std::vector<uint16_t>* all, std::vector<float>* values) {
    uint16_t indices[kWireChunk];
    for (size_t i = begin; i < end; ++i) {
      SelectFrom& chunk = chunks_[i];
      chunk.selected = kernels::find_at_least(chunk.v, chunk.count, magnitude, indices);
      all->insert(all->end(), indices, indices + chunk.selected);
      for (size_t s = 0; s < chunk.selected; ++s) values->push_back(chunk.v[indices[s]]);
    }
  }

  // Of what was found, leaves only what is above the magnitude, and the first others up to k.
  void trim(uint32_t magnitude, size_t k) {
    const auto above =
        std::count_if(found_.begin(), found_.end(), [=](float value) { return magnitude_of(value) > magnitude; });
    size_t equal = k - std::min(k, static_cast<size_t>(above)), from = 0, to = first_;
    for (size_t i = 0; i < n_; ++i) {
      const size_t found = chunks_[i].selected, before = to;
      for (size_t s = 0; s < found; ++s, ++from) {
        const uint32_t one = magnitude_of(found_[from]);
        if (one < magnitude || (one == magnitude && equal == 0)) continue;
        if (one == magnitude) --equal;
        (*indices_)[to++] = (*indices_)[first_ + from];
      }
      chunks_[i].selected = to - before;
    }
    indices_->resize(to);
  }

  // Of the elements found, those of some chunks that follow each other.
  struct Part {
    std::vector<uint16_t> indices;
    std::vector<float> values;
  };

  SelectFrom* const chunks_;
  const size_t n_;
  ThreadPool& threads_;
  std::vector<uint16_t>* const indices_;
  const size_t first_;  // of what is appended to the indices
  size_t count_ = 0;
  std::vector<float> found_;  // the sample, then the values that reach the threshold
  std::vector<Part> parts_;
};

}  // namespace

void select_largest(SelectFrom* chunks, size_t n, size_t k, uint32_t largest, ThreadPool* threads,
                    std::vector<uint16_t>* indices) {
  for (size_t i = 0; i < n; ++i) chunks[i].selected = 0;
  if (largest != 0) Selection(chunks, n, threads, indices).run(k, largest);
}

}  // namespace perseus

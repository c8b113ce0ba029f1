// The tree of Adasum over parts of tensors.
#include "collective/adasum.h"

#include <cstring>

#include "base/error.h"
#include "base/half.h"
#include "collective/steps.h"

namespace perseus {
namespace {

// How elements lie in memory, and what they are computed in.
struct Float16 {
  using Stored = uint16_t;
  using Number = float;
  static float decode(uint16_t x) { return half_to_float(x); }
  static uint16_t encode(float x) { return float_to_half(x); }
};
struct BFloat16 {
  using Stored = uint16_t;
  using Number = float;
  static float decode(uint16_t x) { return bfloat16_to_float(x); }
  static uint16_t encode(float x) { return float_to_bfloat16(x); }
};
template <typename T>
struct Plain {
  using Stored = T;
  using Number = T;
  static T decode(T x) { return x; }
  static T encode(T x) { return x; }
};

constexpr size_t kDots = 3;

// 1 - a·b / 2|a|²; a vector of zeros is orthogonal to all.
double weight(double dot, double norm) { return norm == 0 ? 1.0 : 1.0 - dot / (2 * norm); }

}  // namespace

// Our part of the ranks' vectors that are left.
class Adasum::Vectors {
 public:
  virtual ~Vectors() = default;
  virtual void load(const Byte* bytes, size_t vectors, size_t elements, double scale) = 0;
  virtual size_t count() const = 0;
  virtual void dots(const std::vector<Segment>& segments, size_t tensors, std::vector<double>* dots) const = 0;
  virtual void combine(const std::vector<Segment>& segments, size_t tensors, const std::vector<double>& dots) = 0;
  virtual void store(Byte* bytes, double scale) const = 0;
};

template <typename Format>
class Adasum::VectorsOf final : public Adasum::Vectors {
 public:
  using Number = typename Format::Number;
  using Stored = typename Format::Stored;

  void load(const Byte* bytes, size_t vectors, size_t elements, double scale) override {
    left_.assign(vectors, std::vector<Number>(elements));
    for (std::vector<Number>& vector : left_)
      for (Number& number : vector) {
        Stored stored;
        std::memcpy(&stored, bytes, sizeof stored);
        bytes += sizeof stored;
        number = Format::decode(stored) * static_cast<Number>(scale);
      }
  }

  size_t count() const override { return left_.size(); }

  void dots(const std::vector<Segment>& segments, size_t tensors, std::vector<double>* dots) const override {
    dots->assign(left_.size() / 2 * tensors * kDots, 0.0);
    for (size_t pair = 0; 2 * pair + 1 < left_.size(); ++pair) {
      const std::vector<Number>&a = left_[2 * pair], &b = left_[2 * pair + 1];
      for (const Segment& segment : segments) {
        double ab = 0, aa = 0, bb = 0;
        for (size_t i = segment.begin; i < segment.end; ++i) {
          const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
          ab += x * y;
          aa += x * x;
          bb += y * y;
        }
        double* to = dots->data() + (pair * tensors + segment.tensor) * kDots;
        to[0] = ab;
        to[1] = aa;
        to[2] = bb;
      }
    }
  }

  void combine(const std::vector<Segment>& segments, size_t tensors, const std::vector<double>& dots) override {
    std::vector<std::vector<Number>> next;
    for (size_t pair = 0; 2 * pair + 1 < left_.size(); ++pair) {
      std::vector<Number>& a = left_[2 * pair];
      const std::vector<Number>& b = left_[2 * pair + 1];
      for (const Segment& segment : segments) {
        const double* of = dots.data() + (pair * tensors + segment.tensor) * kDots;
        const double p = weight(of[0], of[1]), q = weight(of[0], of[2]);
        for (size_t i = segment.begin; i < segment.end; ++i)
          a[i] = static_cast<Number>(p * static_cast<double>(a[i]) + q * static_cast<double>(b[i]));
      }
      next.push_back(std::move(a));
    }
    if (left_.size() % 2 == 1) next.push_back(std::move(left_.back()));
    left_ = std::move(next);
  }

  void store(Byte* bytes, double scale) const override {
    for (Number number : left_[0]) {
      const Stored stored = Format::encode(number * static_cast<Number>(scale));
      std::memcpy(bytes, &stored, sizeof stored);
      bytes += sizeof stored;
    }
  }

 private:
  std::vector<std::vector<Number>> left_;
};

std::unique_ptr<Adasum::Vectors> Adasum::make_vectors(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return std::make_unique<VectorsOf<Float16>>();
    case DType::kBFloat16:
      return std::make_unique<VectorsOf<BFloat16>>();
    case DType::kFloat32:
      return std::make_unique<VectorsOf<Plain<float>>>();
    case DType::kFloat64:
      return std::make_unique<VectorsOf<Plain<double>>>();
    default:
      fail(ErrorKind::kInternal, std::string("[collective] Adasum of ") + dtype_name(dtype));
  }
}

Adasum::Adasum(int ranks, int me, DType dtype, double prescale, double postscale)
    : ranks_(ranks),
      me_(me),
      dtype_(dtype),
      prescale_(prescale),
      postscale_(postscale),
      parts_(static_cast<size_t>(ranks)),
      vectors_(make_vectors(dtype)) {
  plan_.reduction.dtype = dtype;
}

Adasum::~Adasum() = default;

bool Adasum::next(Step* step) {
  step->plan = &plan_;
  step->sizes_vary = true;
  switch (stage_) {
    case Stage::kScatter:
      scatter();
      stage_ = Stage::kCombine;
      return true;
    case Stage::kCombine:
      step->sizes_vary = !combine();
      if (!step->sizes_vary) return true;
      gather();
      stage_ = Stage::kGather;
      return true;
    case Stage::kGather:
      write_outputs();
      stage_ = Stage::kDone;
      return false;
    case Stage::kDone:
      break;
  }
  return false;
}

void Adasum::scatter() {
  // Each tensor is cut by itself: its dot products are sums of sums over parts, and must not depend on its neighbours.
  order_for_ring(pieces_, &parts_, &ordered_);
  plan_.collective = Collective::kAlltoall;
  plan_.pieces = ordered_;
  plan_.send_bytes = parts_;
  plan_.send_rows.assign(parts_.begin(), parts_.end());
}

void Adasum::find_segments() {
  const size_t element = dtype_size(dtype_);
  size_t begin = 0;
  for (size_t tensor = 0; tensor < pieces_.size(); ++tensor) {
    const size_t count = even_part(pieces_[tensor].bytes, parts_.size(), static_cast<size_t>(me_)).bytes / element;
    if (count > 0) segments_.push_back({begin, begin + count, tensor});
    begin += count;
  }
}

// One level of the tree; true when an allreduce of the dot products is needed first.
bool Adasum::combine() {
  const size_t tensors = pieces_.size();
  if (vectors_->count() == 0) {
    find_segments();
    const size_t elements = parts_[static_cast<size_t>(me_)] / dtype_size(dtype_);
    vectors_->load(received_.data(), static_cast<size_t>(ranks_), elements, prescale_);
    std::vector<Byte>().swap(received_);
  } else {
    vectors_->combine(segments_, tensors, dots_);
  }
  if (vectors_->count() == 1) return false;
  vectors_->dots(segments_, tensors, &dots_);
  Byte* memory = reinterpret_cast<Byte*>(dots_.data());
  plan_.clear();
  plan_.collective = Collective::kAllreduce;
  plan_.reduction.dtype = DType::kFloat64;
  plan_.pieces.push_back(Piece{memory, memory, dots_.size() * sizeof(double)});
  return true;
}

void Adasum::gather() {
  part_.resize(parts_[static_cast<size_t>(me_)]);
  vectors_->store(part_.data(), postscale_);
  plan_.clear();
  plan_.collective = Collective::kAllgather;
  plan_.reduction.dtype = dtype_;
  plan_.pieces.push_back(Piece{part_.data(), nullptr, part_.size()});
  plan_.send_rows.push_back(part_.size());
}

void Adasum::write_outputs() {
  const Byte* from = received_.data();
  for (const Piece& piece : ordered_) {
    kernels::copy(piece.out, from, piece.bytes, false);
    from += piece.bytes;
  }
}

Byte* Adasum::allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>&) {
  size_t total = 0;
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    const size_t expected = stage_ == Stage::kGather ? parts_[rank] : parts_[static_cast<size_t>(me_)];
    if (bytes[rank] != expected)
      fail(ErrorKind::kIo, "[collective] Adasum: a peer announced " + std::to_string(bytes[rank]) +
                               " bytes instead of " + std::to_string(expected));
    total += expected;
  }
  received_.resize(total);
  return received_.data();
}

}  // namespace perseus

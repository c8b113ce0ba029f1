// Comparing, serialising and parsing descriptions.
#include "request/request.h"

#include <cstring>

#include "base/error.h"

namespace perseus {

const char* kind_name(Kind kind) {
  constexpr const char* kNames[kKindCount] = {"ALLREDUCE",     "ALLGATHER", "BROADCAST", "ALLTOALL",
                                              "REDUCESCATTER", "BARRIER",   "ADD_GROUP", "REMOVE_GROUP",
                                              "JOIN",          "BREAK",     "BLOCKED"};
  return kNames[static_cast<int>(kind)];
}

int64_t TensorDescription::count() const {
  int64_t count = 1;
  for (int64_t dimension : shape) count *= dimension;
  return count;
}

int64_t TensorDescription::row_count() const {
  int64_t count = 1;
  for (size_t i = 1; i < shape.size(); ++i) count *= shape[i];
  return count;
}

std::vector<size_t> tensor_bytes(const Description& description) {
  std::vector<size_t> bytes;
  for (const TensorDescription& tensor : description.tensors) bytes.push_back(tensor.bytes());
  return bytes;
}

namespace {

bool rows_may_differ(Kind kind) { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }

bool same_shape(Kind kind, const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  if (!rows_may_differ(kind)) return a == b;
  // A scalar has no rows; check_alone refuses it.
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string wish_name(const Description& d) {
  return d.compression.automatic ? "auto" : codec_name(d.compression.codec);
}

// The sentence for one pair of ranks; the order of the checks is Horovod's.
std::string compare(const Description& a, const Description& b) {
  const std::string kind = kind_name(a.kind);
  const size_t tensors = std::min(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < tensors; ++i)
    if (a.tensors[i].dtype != b.tensors[i].dtype)
      return std::string("Mismatched data types: One rank had type ") + dtype_name(a.tensors[i].dtype) +
             ", but another rank had type " + dtype_name(b.tensors[i].dtype) + ".";
  if (a.kind != b.kind)
    return "Mismatched operations: One rank did an " + kind + ", but another rank did an " + kind_name(b.kind) + ".";
  if (a.tensors.size() != b.tensors.size())
    return "Mismatched " + kind + " group sizes: One rank sent " + std::to_string(a.tensors.size()) +
           " tensors, but another rank sent " + std::to_string(b.tensors.size()) + ".";
  for (size_t i = 0; i < tensors; ++i) {
    const std::vector<int64_t>&x = a.tensors[i].shape, &y = b.tensors[i].shape;
    if (same_shape(a.kind, x, y)) continue;
    if (!rows_may_differ(a.kind))
      return "Mismatched " + kind + " tensor shapes: One rank sent a tensor of shape " + shape_text(x) +
             ", but another rank sent a tensor of shape " + shape_text(y) + ".";
    if (x.size() != y.size())
      return "Mismatched " + kind + " tensor shapes: One rank sent a tensor of rank " + std::to_string(x.size()) +
             ", but another rank sent a tensor of rank " + std::to_string(y.size()) + ".";
    for (size_t d = 1; d < x.size(); ++d)
      if (x[d] != y[d])
        return "Mismatched " + kind + " tensor shapes: One rank sent a tensor with dimension " + std::to_string(d) +
               " equal to " + std::to_string(x[d]) + ", but another rank sent a tensor with dimension " +
               std::to_string(d) + " equal to " + std::to_string(y[d]) + ".";
  }
  if (a.prescale != b.prescale || a.postscale != b.postscale)
    return "Mismatched prescale and/or postscale factors: One rank sent factors (" + std::to_string(a.prescale) + ", " +
           std::to_string(a.postscale) + "), but another rank sent factors (" + std::to_string(b.prescale) + ", " +
           std::to_string(b.postscale) + ").";
  if (a.op != b.op)
    return "Mismatched reduction operation: One rank sent reduction op " + std::to_string(static_cast<int>(a.op)) +
           ", but another rank sent reduction op " + std::to_string(static_cast<int>(b.op)) + ".";
  if (a.gradient != b.gradient)
    return "Mismatched gradients: One rank submitted a gradient, but another rank an ordinary " + kind + ".";
  if (!(a.compression.codec == b.compression.codec) || a.compression.automatic != b.compression.automatic ||
      a.compression.inside != b.compression.inside || a.compression.doubles != b.compression.doubles ||
      a.compression.from != b.compression.from)
    return "Mismatched compression: One rank sends " + wish_name(a) + ", but another rank sends " + wish_name(b) + ".";
  if (a.kind == Kind::kBroadcast && a.root != b.root)
    return "Mismatched " + kind + " root ranks: One rank specified root rank " + std::to_string(a.root) +
           ", but another rank specified root rank " + std::to_string(b.root) + ".";
  if (a.ranks != b.ranks) return "Mismatched process sets: ranks do not name the same members.";
  return "";
}

// What one description can be wrong about all by itself; every rank learns of it.
std::string check_alone(const Description& d) {
  if (!rows_may_differ(d.kind) && d.kind != Kind::kReduceScatter) return "";
  for (const TensorDescription& tensor : d.tensors)
    if (tensor.shape.empty())
      return std::string("Process-set rank zero tried to ") + kind_name(d.kind) + " a rank-zero tensor.";
  return "";
}

template <typename T>
void put(std::string* blob, T value) {
  blob->append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

bool same_request(const Description& a, const Description& b) {
  if (a.kind != b.kind || a.op != b.op || a.prescale != b.prescale || a.postscale != b.postscale || a.root != b.root ||
      a.tensors.size() != b.tensors.size() || a.ranks != b.ranks || a.gradient != b.gradient ||
      !(a.compression.codec == b.compression.codec) || a.compression.automatic != b.compression.automatic ||
      a.compression.inside != b.compression.inside || a.compression.doubles != b.compression.doubles ||
      a.compression.from != b.compression.from)
    return false;
  for (size_t i = 0; i < a.tensors.size(); ++i)
    if (a.tensors[i].dtype != b.tensors[i].dtype || !same_shape(a.kind, a.tensors[i].shape, b.tensors[i].shape))
      return false;
  return true;
}

std::string find_mismatch(const std::string& name, const std::vector<Description>& by_rank,
                          const std::vector<int>& ranks) {
  for (size_t i = 0; i < by_rank.size(); ++i)
    if (!by_rank[i].refusal.empty())
      return "Rank " + std::to_string(ranks[i]) + " cannot take part: " + by_rank[i].refusal + " (tensor " + name + ")";
  for (size_t i = 1; i < by_rank.size(); ++i) {
    const std::string text = compare(by_rank[0], by_rank[i]);
    if (!text.empty())
      return text + " (tensor " + name + ", ranks " + std::to_string(ranks[0]) + " and " + std::to_string(ranks[i]) +
             ")";
  }
  const std::string text = check_alone(by_rank[0]);
  return text.empty() ? "" : text + " (tensor " + name + ")";
}

void append_request(const std::string& name, const Description& d, std::string* blob) {
  put(blob, static_cast<uint32_t>(name.size()));
  blob->append(name);
  put(blob, static_cast<uint8_t>(d.kind));
  put(blob, static_cast<uint8_t>(d.op));
  put(blob, static_cast<uint8_t>(d.transient));
  put(blob, static_cast<uint8_t>(d.gradient));
  put(blob, static_cast<uint8_t>(d.compression.automatic));
  put(blob, static_cast<uint8_t>(d.compression.inside));
  put(blob, static_cast<uint8_t>(d.compression.doubles));
  put(blob, d.compression.from);
  put(blob, static_cast<uint8_t>(d.compression.codec.kind));
  put(blob, d.compression.codec.ratio);
  put(blob, static_cast<uint8_t>(d.compression.codec.half_values));
  put(blob, static_cast<int32_t>(d.compression.codec.every));
  put(blob, d.compression.codec.momentum);
  put(blob, d.compression.codec.scale);
  put(blob, d.prescale);
  put(blob, d.postscale);
  put(blob, static_cast<int32_t>(d.root));
  put(blob, static_cast<int32_t>(d.priority));
  put(blob, static_cast<uint32_t>(d.tensors.size()));
  for (const TensorDescription& tensor : d.tensors) {
    put(blob, static_cast<uint8_t>(tensor.dtype));
    put(blob, static_cast<uint32_t>(tensor.shape.size()));
    for (int64_t dimension : tensor.shape) put(blob, dimension);
  }
  put(blob, static_cast<uint32_t>(d.ranks.size()));
  for (int rank : d.ranks) put(blob, static_cast<int32_t>(rank));
  put(blob, static_cast<uint32_t>(d.nans.size()));
  for (uint32_t tensor : d.nans) put(blob, tensor);
  put(blob, static_cast<uint8_t>(d.flush));
  put(blob, static_cast<uint32_t>(d.times.size()));
  for (uint32_t time : d.times) put(blob, time);
  put(blob, static_cast<uint32_t>(d.refusal.size()));
  blob->append(d.refusal);
}

template <typename T>
T BlobReader::take() {
  if (static_cast<size_t>(end_ - at_) < sizeof(T)) fail(ErrorKind::kIo, "[negotiation] truncated announcement");
  T value;
  std::memcpy(&value, at_, sizeof value);
  at_ += sizeof value;
  return value;
}

size_t BlobReader::take_count(size_t element_bytes) {
  const size_t count = take<uint32_t>();
  if (count > static_cast<size_t>(end_ - at_) / element_bytes)
    fail(ErrorKind::kIo, "[negotiation] announcement longer than its message");
  return count;
}

std::string BlobReader::take_text() {
  const size_t length = take_count(1);
  at_ += length;
  return std::string(at_ - length, length);
}

void BlobReader::read_request(std::string* name, Description* d) {
  *name = take_text();
  const uint8_t kind = take<uint8_t>();
  const uint8_t op = take<uint8_t>();
  if (kind >= kKindCount || op > static_cast<uint8_t>(ReduceOp::kProduct))
    fail(ErrorKind::kIo, "[negotiation] announcement of an unknown operation");
  d->kind = static_cast<Kind>(kind);
  d->op = static_cast<ReduceOp>(op);
  d->transient = take<uint8_t>() != 0;
  d->gradient = take<uint8_t>() != 0;
  d->compression.automatic = take<uint8_t>() != 0;
  d->compression.inside = take<uint8_t>() != 0;
  d->compression.doubles = take<uint8_t>() != 0;
  d->compression.from = take<uint64_t>();
  const uint8_t codec = take<uint8_t>();
  if (codec >= kCodecKinds) fail(ErrorKind::kIo, "[negotiation] announcement of an unknown codec");
  d->compression.codec.kind = static_cast<CodecKind>(codec);
  d->compression.codec.ratio = take<double>();
  d->compression.codec.half_values = take<uint8_t>() != 0;
  d->compression.codec.every = take<int32_t>();
  d->compression.codec.momentum = take<double>();
  d->compression.codec.scale = take<double>();
  d->prescale = take<double>();
  d->postscale = take<double>();
  d->root = take<int32_t>();
  d->priority = take<int32_t>();
  d->tensors.resize(take_count(5));
  for (TensorDescription& tensor : d->tensors) {
    const uint8_t dtype = take<uint8_t>();
    if (dtype >= kDTypeCount) fail(ErrorKind::kIo, "[negotiation] announcement of an unknown dtype");
    tensor.dtype = static_cast<DType>(dtype);
    tensor.shape.resize(take_count(8));
    for (int64_t& dimension : tensor.shape) dimension = take<int64_t>();
  }
  d->ranks.resize(take_count(4));
  for (int& rank : d->ranks) rank = take<int32_t>();
  d->nans.resize(take_count(4));
  for (uint32_t& tensor : d->nans)
    if ((tensor = take<uint32_t>()) >= d->tensors.size())
      fail(ErrorKind::kIo, "[negotiation] announcement of a NaN in no tensor");
  const uint8_t flush = take<uint8_t>();
  if (flush >= kFlushes) fail(ErrorKind::kIo, "[negotiation] announcement of an unknown flush");
  d->flush = static_cast<Flush>(flush);
  d->times.resize(take_count(4));
  for (uint32_t& time : d->times) time = take<uint32_t>();
  d->refusal = take_text();
}

}  // namespace perseus

// Comparing and printing descriptions.
#include "request/request.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include "base/hash.h"

namespace perseus {

static_assert(lists_every_member<CodecSpec>() && lists_every_member<TensorDescription>() &&
                  lists_every_member<RequestTerms>() && lists_every_member<CompressionTerms>() &&
                  lists_every_member<RequestNotes>(),
              "a field that its struct's fields() does not list would be neither compared nor announced");

const char* kind_name(Kind kind) {
  constexpr const char* kNames[kKindCount] = {"ALLREDUCE",     "ALLGATHER", "BROADCAST", "ALLTOALL",
                                              "REDUCESCATTER", "BARRIER",   "ADD_GROUP", "REMOVE_GROUP",
                                              "JOIN",          "SEND",      "RECEIVE"};
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

// Of tensors that are not floating nothing is held back: they count as others.
void describe_tensors(const Description& description, Residuals::Tensors* tensors) {
  uint64_t shapes = kFnvBasis, dtypes = kFnvBasis;
  const auto add = [](uint64_t* hash, int64_t number) {
    for (int byte = 0; byte < 8; ++byte)
      *hash = (*hash ^ (static_cast<uint64_t>(number) >> (8 * byte) & 0xff)) * kFnvPrime;
  };
  tensors->sizes.clear();
  for (const TensorDescription& tensor : description.tensors) {
    tensors->sizes.push_back(static_cast<size_t>(tensor.count()));
    add(&shapes, static_cast<int64_t>(2 * tensor.shape.size() + (dtype_is_float(tensor.dtype) ? 1 : 0)));
    for (const int64_t extent : tensor.shape) add(&shapes, extent);
    add(&dtypes, static_cast<int64_t>(tensor.dtype));
  }
  for (const int dimension : description.ranks) add(&shapes, dimension);
  tensors->shapes = std::max<uint64_t>(shapes, 1);
  tensors->dtypes = std::max<uint64_t>(dtypes, 1);
}

namespace {

// ---- printing ----

std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(Kind value) { return kind_name(value); }
std::string text_of(DType value) { return dtype_name(value); }
std::string text_of(CodecKind value) { return codec_kind_name(value); }
std::string text_of(const std::string& value) { return "'" + value + "'"; }
std::string text_of(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}
template <typename T>
std::string text_of(const T& value);

template <typename T>
std::string text_of(const std::vector<T>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i > 0 ? ", " : "") + text_of(values[i]);
  return text + "]";
}

template <typename Struct>
std::string fields_text(const Struct& value) {
  std::string text;
  for_each_field<Struct>([&](const auto& field) {
    text += (text.empty() ? "" : " ") + std::string(field.name) + "=" + text_of(value.*field.member);
  });
  return text;
}

template <typename T>
std::string text_of(const T& value) {
  if constexpr (HasFields<T>::value) return "{" + fields_text(value) + "}";
  else if constexpr (std::is_enum_v<T>) return std::to_string(static_cast<int>(value));
  else return std::to_string(value);
}

// ---- comparing ----

bool rows_may_differ(Kind kind) { return kind == Kind::kAllgather || kind == Kind::kAlltoall; }

inline bool same_shape(Kind kind, const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  if (!rows_may_differ(kind)) return a == b;
  // A scalar has no rows; check_alone refuses it.
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

template <typename Value>
bool same_value(Kind, const Value& a, const Value& b) {
  return a == b;
}
[[gnu::always_inline]] inline bool same_value(Kind kind, const std::vector<TensorDescription>& a,
                                              const std::vector<TensorDescription>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].dtype != b[i].dtype || !same_shape(kind, a[i].shape, b[i].shape)) return false;
  return true;
}

// Horovod compares these before it compares the operations.
std::string dtype_mismatch(const RequestTerms& a, const RequestTerms& b) {
  for (size_t i = 0; i < std::min(a.tensors.size(), b.tensors.size()); ++i)
    if (a.tensors[i].dtype != b.tensors[i].dtype)
      return "Mismatched data types: One rank had type " + text_of(a.tensors[i].dtype) +
             ", but another rank had type " + text_of(b.tensors[i].dtype) + ".";
  return "";
}

std::string shape_mismatch(Kind kind, const std::vector<int64_t>& x, const std::vector<int64_t>& y) {
  const std::string begin = std::string("Mismatched ") + kind_name(kind);
  if (!rows_may_differ(kind))
    return begin + " tensor shapes: One rank sent a tensor of shape " + text_of(x) +
           ", but another rank sent a tensor of shape " + text_of(y) + ".";
  if (x.size() != y.size())
    return begin + " tensor shapes: One rank sent a tensor of rank " + text_of(x.size()) +
           ", but another rank sent a tensor of rank " + text_of(y.size()) + ".";
  const size_t d = static_cast<size_t>(std::mismatch(x.begin() + 1, x.end(), y.begin() + 1).first - x.begin());
  return begin + " tensor shapes: One rank sent a tensor with dimension " + text_of(d) + " equal to " + text_of(x[d]) +
         ", but another rank sent a tensor with dimension " + text_of(d) + " equal to " + text_of(y[d]) + ".";
}

std::string wish_name(const CompressionTerms& terms) {
  std::string name = terms.automatic ? "auto" : codec_name(terms.codec);
  if (terms.momentum != 0) name += " with momentum " + text_of(terms.momentum);
  return name;
}

// Of "Mismatched …: One rank did this": " did this".
std::string what_it_did(const std::string& mismatch) {
  constexpr std::string_view kOneRank = "One rank";
  return mismatch.substr(mismatch.find(kOneRank) + kOneRank.size());
}

// The sentence for one pair of ranks.
std::string pair_mismatch(const Description& a, const Description& b) {
  std::string sentence = dtype_mismatch(a, b);
  for_each_field<RequestTerms>([&](const auto& field) {
    const auto &x = a.*field.member, &y = b.*field.member;
    if (!sentence.empty() || same_value(a.kind, x, y)) return;
    if (field.text != nullptr) sentence = field.text(a, b);
    else
      sentence = std::string(field.mismatch) + " " + text_of(x) + ", but another rank" + what_it_did(field.mismatch) +
                 " " + text_of(y) + ".";
  });
  if (sentence.empty() && !(a.compression == b.compression))
    return "Mismatched compression: One rank sends " + wish_name(a.compression) + ", but another rank sends " +
           wish_name(b.compression) + ".";
  return sentence;
}

}  // namespace

std::string tensor_mismatch(const RequestTerms& a, const RequestTerms& b) {
  if (a.tensors.size() != b.tensors.size())
    return std::string("Mismatched ") + kind_name(a.kind) + " group sizes: One rank sent " + text_of(a.tensors.size()) +
           " tensors, but another rank sent " + text_of(b.tensors.size()) + ".";
  size_t i = 0;
  while (same_shape(a.kind, a.tensors[i].shape, b.tensors[i].shape)) ++i;
  const std::vector<int64_t>&x = a.tensors[i].shape, &y = b.tensors[i].shape;
  // The shapes are in the order of memory, so that they may differ by that alone.
  if (a.ranks != b.ranks && std::is_permutation(x.begin(), x.end(), y.begin(), y.end())) return ranks_mismatch(a, b);
  return shape_mismatch(a.kind, x, y);
}

std::string factor_mismatch(const RequestTerms& a, const RequestTerms& b) {
  return "Mismatched prescale and/or postscale factors: One rank sent factors (" + std::to_string(a.prescale) + ", " +
         std::to_string(a.postscale) + "), but another rank sent factors (" + std::to_string(b.prescale) + ", " +
         std::to_string(b.postscale) + ").";
}

std::string gradient_mismatch(const RequestTerms& a, const RequestTerms&) {
  return std::string("Mismatched gradients: One rank submitted a gradient, but another rank an ordinary ") +
         kind_name(a.kind) + ".";
}

std::string root_mismatch(const RequestTerms& a, const RequestTerms& b) {
  if (a.kind != Kind::kBroadcast) return "";
  return "Mismatched BROADCAST root ranks: One rank specified root rank " + text_of(a.root) +
         ", but another rank specified root rank " + text_of(b.root) + ".";
}

std::string ranks_mismatch(const RequestTerms& a, const RequestTerms& b) {
  if (a.kind != Kind::kAllreduce && a.kind != Kind::kBroadcast)
    return "Mismatched process sets: ranks do not name the same members.";
  const auto order = [](const RequestTerms& terms) {
    return terms.ranks.empty() ? "by rows" : "with its dimensions in the order " + text_of(terms.ranks);
  };
  return std::string("Mismatched ") + kind_name(a.kind) + " memory layouts: One rank's tensor lies in memory " +
         order(a) + ", but another rank's " + order(b) + ". Use one memory format on all ranks, for example by " +
         ".contiguous().";
}

bool same_request(const Description& a, const Description& b) {
  return all_fields<RequestTerms>(
             [&](const auto& field) { return same_value(a.kind, a.*field.member, b.*field.member); }) &&
         a.compression == b.compression && a.proportional == b.proportional &&
         (b.stays_on_device || !a.stays_on_device);
}

std::string check_alone(const Description& d) {
  if (!rows_may_differ(d.kind) && d.kind != Kind::kReduceScatter) return "";
  for (const TensorDescription& tensor : d.tensors)
    if (tensor.shape.empty())
      return std::string("Process-set rank zero tried to ") + kind_name(d.kind) + " a rank-zero tensor.";
  return "";
}

std::string find_mismatch(const std::string& name, const std::vector<Description>& by_rank,
                          const std::vector<int>& ranks) {
  for (size_t i = 0; i < by_rank.size(); ++i)
    if (!by_rank[i].refusal.empty())
      return "Rank " + std::to_string(ranks[i]) + " cannot take part: " + by_rank[i].refusal + " (tensor " + name + ")";
  for (size_t i = 1; i < by_rank.size(); ++i) {
    const std::string text = pair_mismatch(by_rank[0], by_rank[i]);
    if (!text.empty())
      return text + " (tensor " + name + ", ranks " + std::to_string(ranks[0]) + " and " + std::to_string(ranks[i]) +
             ")";
  }
  const std::string text = check_alone(by_rank[0]);
  return text.empty() ? "" : text + " (tensor " + name + ")";
}

std::string to_text(const Description& description) {
  return fields_text<RequestTerms>(description) + " compression=" + text_of(description.compression) + " " +
         fields_text<RequestNotes>(description);
}

}  // namespace perseus

// Attributes are optional: an op has those that its kind needs; see registration.cc.
#include "settings.h"

#include <cstring>
#include <memory>
#include <vector>

#include "status.h"

namespace perseus::tensorflow {
namespace {

struct Words {
  const char* label;
  const char* plain;
  const char* grouped;
};

// By kind. The prefixes are those of the other adapters: the same tensor may be broadcast and reduced under one name.
constexpr Words kWords[] = {
    {"HorovodAllreduce", "allreduce.", "grouped_allreduce."},
    {"HorovodAllgather", "allgather.", "grouped_allgather."},
    {"HorovodBroadcast", "broadcast.", "grouped_broadcast."},
    {"HorovodAlltoall", "alltoall.", "grouped_alltoall."},
    {"HorovodReducescatter", "reducescatter.", "grouped_reducescatter."},
};

class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction) : construction_(construction) {}

  bool ok() const { return status_.ok(); }
  TF_Status* status() { return status_.get(); }

  int64_t integer(const char* name, int64_t otherwise) {
    int64_t value = otherwise;
    if (has(name)) TF_OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_.get());
    return value;
  }

  // Doubles are passed as their bits, since TensorFlow's attributes of real numbers have single precision.
  double real(const char* name, double otherwise) {
    double value = otherwise;
    int64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = integer(name, bits);
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
  }

  bool truth(const char* name) {
    unsigned char value = 0;
    if (has(name)) TF_OpKernelConstruction_GetAttrBool(construction_, name, &value, status_.get());
    return value != 0;
  }

  std::string text(const char* name) {
    int32_t list_size = 0, size = 0;
    if (!has(name)) return "";
    TF_OpKernelConstruction_GetAttrSize(construction_, name, &list_size, &size, status_.get());
    if (!ok() || size <= 0) return "";
    std::string value(static_cast<size_t>(size), '\0');
    TF_OpKernelConstruction_GetAttrString(construction_, name, value.data(), value.size(), status_.get());
    return value;
  }

 private:
  bool has(const char* name) {
    return ok() && TF_OpKernelConstruction_HasAttr(construction_, name, status_.get()) && ok();
  }

  TF_OpKernelConstruction* const construction_;
  OwnedStatus status_;
};

// The given name, or else, in a graph, the node's: functions are inlined under a new name wherever they are called.
std::string tensor_name(TF_OpKernelConstruction* construction, bool eager, Attributes* attributes) {
  std::string name = attributes->text("tensor_name");
  if (eager || !name.empty()) return name;
  const TF_StringView node = TF_OpKernelConstruction_GetName(construction);
  name.assign(node.data, node.len);
  const size_t slash = name.rfind('/');
  return attributes->truth("ignore_name_scope") && slash != std::string::npos ? name.substr(slash + 1) : name;
}

}  // namespace

Settings* read_settings(perseus_kind kind, TF_OpKernelConstruction* construction) {
  auto settings = std::make_unique<Settings>();
  Attributes attributes(construction);
  settings->kind = kind;
  settings->eager = attributes.truth("eager");
  if (kind == PERSEUS_JOIN) {
    settings->label = "HorovodJoin";
    settings->name = "join.noname";
  } else {
    const Words& words = kWords[kind];
    settings->label = words.label;
    settings->prefix = attributes.truth("grouped") ? words.grouped : words.plain;
    const std::string name = tensor_name(construction, settings->eager, &attributes);
    if (!name.empty()) settings->name = settings->prefix + name;
  }
  settings->group = static_cast<int>(attributes.integer("process_set_id", 0));
  settings->op = static_cast<perseus_reduce_op>(attributes.integer("reduce_op", PERSEUS_SUM));
  settings->prescale = attributes.real("prescale", 1.0);
  settings->postscale = attributes.real("postscale", 1.0);
  settings->root = static_cast<int>(attributes.integer("root_rank", 0));
  settings->priority = static_cast<int>(attributes.integer("priority", 0));
  settings->with_splits = attributes.truth("with_splits");
  settings->with_outcome = attributes.integer("outcomes", 0) != 0;
  settings->with_rate = attributes.integer("rates", 0) != 0;
  settings->gradient_of = static_cast<uint64_t>(attributes.integer("gradient_of", 0));
  settings->codec = static_cast<int>(attributes.integer("codec", PERSEUS_CODEC_SETTINGS));
  settings->codec_argument = attributes.real("codec_argument", 0.0);
  if (attributes.ok()) return settings.release();
  TF_OpKernelConstruction_Failure(construction, attributes.status());
  return nullptr;
}

}  // namespace perseus::tensorflow

// Numbers in one order, then the name, every unusual character of it as %XX.
#include "plan.h"

#include <cstring>
#include <memory>
#include <sstream>

#include "settings.h"

namespace perseus::tensorflow::xla {
namespace {

constexpr char kDigits[] = "0123456789abcdef";

int64_t bits(double value) {
  int64_t number;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

double real(int64_t number) {
  double value;
  std::memcpy(&value, &number, sizeof(value));
  return value;
}

bool usual(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || std::strchr("-./>_", c);
}

void write(std::ostringstream* text, const std::vector<int64_t>& shape) {
  *text << shape.size() << ' ';
  for (const int64_t extent : shape) *text << extent << ' ';
}

template <typename Number>
Number next(std::istringstream* text) {
  int64_t number = 0;
  *text >> number;
  return static_cast<Number>(number);
}

std::vector<int64_t> next_shape(std::istringstream* text) {
  std::vector<int64_t> shape(next<size_t>(text));
  for (int64_t& extent : shape) extent = next<int64_t>(text);
  return shape;
}

}  // namespace

bool read_plan(perseus_kind kind, void* construction, Plan* plan) {
  const std::unique_ptr<const Settings> settings(
      read_settings(kind, static_cast<TF_OpKernelConstruction*>(construction)));
  if (settings == nullptr) return false;
  plan->kind = kind;
  plan->group = settings->group;
  plan->op = settings->op;
  plan->prescale = settings->prescale;
  plan->postscale = settings->postscale;
  plan->root = settings->root;
  plan->priority = settings->priority;
  plan->with_outcome = settings->with_outcome;
  plan->with_rate = settings->with_rate;
  plan->gradient_of = settings->gradient_of;
  plan->codec = settings->codec;
  plan->codec_argument = settings->codec_argument;
  plan->name = settings->name;
  return true;
}

std::string to_text(const Plan& plan) {
  std::ostringstream text;
  text << plan.kind << ' ' << plan.group << ' ' << plan.op << ' ' << bits(plan.prescale) << ' ' << bits(plan.postscale)
       << ' ' << plan.root << ' ' << plan.priority << ' ' << plan.with_outcome << ' ' << plan.with_rate << ' '
       << static_cast<int64_t>(plan.gradient_of) << ' ' << plan.codec << ' ' << bits(plan.codec_argument) << ' '
       << plan.tensors.size() << ' ';
  for (const PlannedTensor& tensor : plan.tensors) {
    text << tensor.dtype << ' ';
    write(&text, tensor.shape);
    write(&text, tensor.result);
  }
  for (const char c : plan.name) {
    const auto byte = static_cast<unsigned char>(c);
    if (usual(c)) text << c;
    else text << '%' << kDigits[byte / 16] << kDigits[byte % 16];
  }
  return text.str();
}

Plan from_text(std::string_view given) {
  std::istringstream text{std::string(given)};
  Plan plan;
  plan.kind = next<perseus_kind>(&text);
  plan.group = next<int>(&text);
  plan.op = next<int>(&text);
  plan.prescale = real(next<int64_t>(&text));
  plan.postscale = real(next<int64_t>(&text));
  plan.root = next<int>(&text);
  plan.priority = next<int>(&text);
  plan.with_outcome = next<int>(&text) != 0;
  plan.with_rate = next<int>(&text) != 0;
  plan.gradient_of = next<uint64_t>(&text);
  plan.codec = next<int>(&text);
  plan.codec_argument = real(next<int64_t>(&text));
  plan.tensors.resize(next<size_t>(&text));
  for (PlannedTensor& tensor : plan.tensors) {
    tensor.dtype = next<perseus_dtype>(&text);
    tensor.shape = next_shape(&text);
    tensor.result = next_shape(&text);
  }
  std::string name;
  text >> name;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] != '%') {
      plan.name += name[i];
      continue;
    }
    plan.name += static_cast<char>(std::stoi(name.substr(i + 1, 2), nullptr, 16));
    i += 2;
  }
  return plan;
}

size_t bytes_of(perseus_dtype dtype, const std::vector<int64_t>& shape) {
  size_t bytes = 1;
  if (dtype == PERSEUS_FLOAT16 || dtype == PERSEUS_BFLOAT16 || dtype == PERSEUS_INT16) bytes = 2;
  if (dtype == PERSEUS_FLOAT32 || dtype == PERSEUS_INT32) bytes = 4;
  if (dtype == PERSEUS_FLOAT64 || dtype == PERSEUS_INT64) bytes = 8;
  for (const int64_t extent : shape) bytes *= static_cast<size_t>(extent);
  return bytes;
}

const char* label_of(perseus_kind kind) {
  switch (kind) {
    case PERSEUS_ALLREDUCE:
      return "HorovodAllreduce";
    case PERSEUS_ALLGATHER:
      return "HorovodAllgather";
    case PERSEUS_BROADCAST:
      return "HorovodBroadcast";
    default:
      return "HorovodReducescatter";
  }
}

}  // namespace perseus::tensorflow::xla

// The ops and their kernels, registered while the library is being loaded. Single-threaded.
//
// All are stateful, so that TensorFlow neither merges nor constant-folds them; Python takes their order away from them
// again (perseus/tensorflow/library.py). Shapes are set there, too: the C API shows only the first input's.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "call.h"
#include "facts.h"
#include "settings.h"
#include "status.h"

namespace perseus::tensorflow {
namespace {

constexpr const char* kReduced =
    "T: list({half, bfloat16, float, double, uint8, int8, int16, int32, int64, bool}) >= 1";
constexpr const char* kMoved =
    "T: list({half, bfloat16, float, double, uint8, int8, int16, uint16, int32, int64, bool}) >= 1";
constexpr const char* kMovedOne = "T: {half, bfloat16, float, double, uint8, int8, int16, uint16, int32, int64, bool}";
// 4607182418800017408 is 1.0 as an integer, see settings.cc.
constexpr const char* kPrescale = "prescale: int = 4607182418800017408";
constexpr const char* kPostscale = "postscale: int = 4607182418800017408";

using Specs = std::initializer_list<const char*>;

void must(const OwnedStatus& status, const char* op) {
  if (status.ok()) return;
  std::fprintf(stderr, "[tensorflow] cannot register %s: %s\n", op, TF_Message(status.get()));
  std::abort();
}

void define(const char* op, const Specs& inputs, const Specs& outputs, const Specs& attributes) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(op);
  for (const char* spec : attributes) TF_OpDefinitionBuilderAddAttr(builder, spec);
  for (const char* spec : inputs) TF_OpDefinitionBuilderAddInput(builder, spec);
  for (const char* spec : outputs) TF_OpDefinitionBuilderAddOutput(builder, spec);
  TF_OpDefinitionBuilderSetIsStateful(builder, true);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, TF_ShapeInferenceContextSetUnknownShape);
  const OwnedStatus status;
  TF_RegisterOpDefinition(builder, status.get());
  must(status, op);
}

template <perseus_kind kind>
void* create(TF_OpKernelConstruction* construction) {
  return read_settings(kind, construction);
}

void compute(void* settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  start_call(*static_cast<const Settings*>(settings), context, done);
}

void destroy(void* settings) { delete static_cast<Settings*>(settings); }

template <perseus_kind kind>
void serve(const char* op) {
  const OwnedStatus status;
  TF_RegisterKernelBuilder(op, TF_NewAsyncKernelBuilder(op, "CPU", create<kind>, compute, destroy), status.get());
  must(status, op);
}

// A number about the world.
template <Fact fact>
void define_fact(const char* op) {
  define(op, {}, {"number: int32"}, {"process_set_id: int = 0"});
  const OwnedStatus status;
  TF_RegisterKernelBuilder(op, TF_NewKernelBuilder(op, "CPU", create_fact<fact>, compute_fact, destroy_fact),
                           status.get());
  must(status, op);
}

const char* const kName = "tensor_name: string = ''";
const char* const kEager = "eager: bool = false";
const char* const kIgnoreScope = "ignore_name_scope: bool = false";
const char* const kGroup = "process_set_id: int = 0";
const char* const kGrouped = "grouped: bool = false";
const char* const kOp = "reduce_op: int";

bool register_all() {
  define("PerseusAllreduce", {"tensors: T", "learning_rate: rates * double"},
         {"reduced: T", "outcome: outcomes * int32"},
         {kReduced, kName, kEager, kIgnoreScope, kGroup, kGrouped, kOp, kPrescale, kPostscale, "priority: int = 0",
          "outcomes: int >= 0 = 0", "rates: int >= 0 = 0", "gradient_of: int = 0", "codec: int = 0",
          "codec_argument: int = 0"});
  serve<PERSEUS_ALLREDUCE>("PerseusAllreduce");
  define("PerseusAllgather", {"tensors: T"}, {"gathered: T"},
         {kMoved, kName, kEager, kIgnoreScope, kGroup, kGrouped, "gradient_of: int = 0"});
  serve<PERSEUS_ALLGATHER>("PerseusAllgather");
  define("PerseusBroadcast", {"tensors: T"}, {"copied: T"},
         {kMoved, kName, kEager, kIgnoreScope, kGroup, kGrouped, "root_rank: int"});
  serve<PERSEUS_BROADCAST>("PerseusBroadcast");
  define("PerseusAlltoall", {"tensor: T", "splits: int32"}, {"received: T", "received_splits: int32"},
         {kMovedOne, kName, kEager, kIgnoreScope, kGroup, "with_splits: bool"});
  serve<PERSEUS_ALLTOALL>("PerseusAlltoall");
  define("PerseusReducescatter", {"tensors: T"}, {"part: T"},
         {kReduced, kName, kEager, kIgnoreScope, kGroup, kGrouped, kOp, kPrescale, kPostscale});
  serve<PERSEUS_REDUCESCATTER>("PerseusReducescatter");
  define("PerseusJoin", {}, {"last: int32"}, {kEager});
  serve<PERSEUS_JOIN>("PerseusJoin");
  define_fact<Fact::kSize>("PerseusSize");
  define_fact<Fact::kRank>("PerseusRank");
  define_fact<Fact::kLocalSize>("PerseusLocalSize");
  define_fact<Fact::kLocalRank>("PerseusLocalRank");
  define_fact<Fact::kIncluded>("PerseusProcessSetIncluded");
  return true;
}

[[maybe_unused]] const bool registered = register_all();

}  // namespace
}  // namespace perseus::tensorflow

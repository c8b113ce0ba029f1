// Turns each op into calls of targets.h in a program of XLA for the CPU. Each object serves one compilation.
//
// The only file that sees TensorFlow's own headers, which take a minute to compile.
#include "../../world/world.h"
#include "plan.h"
#include "question.h"
#include "targets.h"
#include "tensorflow/compiler/tf2xla/xla_op_kernel.h"
#include "tensorflow/compiler/tf2xla/xla_op_registry.h"

namespace perseus::tensorflow::xla {
namespace {

namespace tf = ::tensorflow;
using Shapes = std::vector<::xla::Shape>;
using Operands = std::vector<::xla::XlaOp>;

::xla::Shape number_of(::xla::PrimitiveType type) { return ::xla::ShapeUtil::MakeShapeWithDescendingLayout(type, {}); }

// All have side effects, so they are neither merged nor removed. Tensors are row-major, as the core requires.
::xla::XlaOp call(::xla::XlaBuilder* program, const char* target, const Operands& operands, const Shapes& shapes,
                  const ::xla::Shape& result, const std::string& text) {
  return ::xla::CustomCallWithLayout(program, target, operands, result, shapes, as_argument(text),
                                     /*has_side_effect=*/true, {}, nullptr, ::xla::CustomCallSchedule::SCHEDULE_NONE,
                                     static_cast<::xla::CustomCallApiVersion>(interface_version()));
}

bool core_dtype(::xla::PrimitiveType type, perseus_dtype* found) {
  switch (type) {
    case ::xla::F16:
      *found = PERSEUS_FLOAT16;
      return true;
    case ::xla::BF16:
      *found = PERSEUS_BFLOAT16;
      return true;
    case ::xla::F32:
      *found = PERSEUS_FLOAT32;
      return true;
    case ::xla::F64:
      *found = PERSEUS_FLOAT64;
      return true;
    case ::xla::U8:
      *found = PERSEUS_UINT8;
      return true;
    case ::xla::S8:
      *found = PERSEUS_INT8;
      return true;
    case ::xla::S16:
    case ::xla::U16:  // which is only moved: the op's attribute refuses it elsewhere
      *found = PERSEUS_INT16;
      return true;
    case ::xla::S32:
      *found = PERSEUS_INT32;
      return true;
    case ::xla::S64:
      *found = PERSEUS_INT64;
      return true;
    case ::xla::PRED:
      *found = PERSEUS_BOOL;
      return true;
    default:
      return false;
  }
}

template <perseus_kind kind>
class Collective : public tf::XlaOpKernel {
 public:
  explicit Collective(tf::OpKernelConstruction* construction) : XlaOpKernel(construction) {
    read_plan(kind, construction, &plan_);  // or the construction has failed
  }

  void Compile(tf::XlaOpKernelContext* context) override {
    Plan plan = plan_;
    Operands operands;
    Shapes shapes, results;
    int32_t size = 1, rank = 0;
    if ((kind == PERSEUS_ALLGATHER || kind == PERSEUS_REDUCESCATTER) && !place(context, &size, &rank)) return;
    const int count = context->num_inputs() - (plan.with_rate ? 1 : 0);
    for (int i = 0; i < count; ++i) {
      auto given = context->InputXlaShape(i);
      OP_REQUIRES_OK(context, given.status());
      PlannedTensor tensor;
      OP_REQUIRES(context, core_dtype(given.value().element_type(), &tensor.dtype),
                  tf::errors::InvalidArgument(label_of(kind), ": the data type is not supported."));
      tensor.shape.assign(given.value().dimensions().begin(), given.value().dimensions().end());
      tensor.result = tensor.shape;
      if (kind == PERSEUS_ALLGATHER || kind == PERSEUS_REDUCESCATTER) {
        OP_REQUIRES(context, !tensor.shape.empty(),
                    tf::errors::InvalidArgument(label_of(kind), ": a tensor without dimensions has no rows."));
        const int64_t rows = tensor.shape[0];
        tensor.result[0] = kind == PERSEUS_ALLGATHER ? rows * size : rows / size + (rank < rows % size ? 1 : 0);
      }
      const ::xla::PrimitiveType type = given.value().element_type();
      shapes.push_back(::xla::ShapeUtil::MakeShapeWithDescendingLayout(type, tensor.shape));
      results.push_back(::xla::ShapeUtil::MakeShapeWithDescendingLayout(type, tensor.result));
      operands.push_back(context->Input(i));
      plan.tensors.push_back(std::move(tensor));
    }
    if (plan.with_rate) {
      shapes.push_back(number_of(::xla::F64));
      operands.push_back(context->Input(count));
    }
    if (plan.with_outcome) results.push_back(number_of(::xla::S32));
    ::xla::XlaBuilder* program = context->builder();
    const ::xla::Shape running = number_of(::xla::S64);
    const auto started = call(program, kStart, operands, shapes, running, to_text(plan));
    const auto waited = call(program, kWait, {started}, {running}, running, "");
    const auto taken = call(program, kTake, {waited}, {running}, ::xla::ShapeUtil::MakeTupleShape(results), "");
    for (size_t i = 0; i < results.size(); ++i)
      context->SetOutput(static_cast<int>(i), ::xla::GetTupleElement(taken, static_cast<int64_t>(i)));
  }

 private:
  // This rank's index among those that take part.
  bool place(tf::XlaOpKernelContext* context, int32_t* size, int32_t* rank) const {
    const WorldUse world;
    if (world.context() == nullptr) {
      context->CtxFailure(tf::errors::FailedPrecondition(kNotInitialized));
      return false;
    }
    if (answer(world.context(), {Fact::kSize, plan_.group}, size) &&
        answer(world.context(), {Fact::kRank, plan_.group}, rank))
      return true;
    context->CtxFailure(tf::errors::InvalidArgument(kNoGroup));
    return false;
  }

  Plan plan_;
};

template <Fact fact>
class Number : public tf::XlaOpKernel {
 public:
  explicit Number(tf::OpKernelConstruction* construction) : XlaOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("process_set_id", &group_));
  }

  void Compile(tf::XlaOpKernelContext* context) override {
    const std::string text = std::to_string(static_cast<int>(fact)) + " " + std::to_string(group_);
    context->SetOutput(0, call(context->builder(), kAsk, {}, {}, number_of(::xla::S32), text));
  }

 private:
  int group_ = 0;
};

constexpr const char* kDevice = "XLA_CPU_JIT";

REGISTER_XLA_OP(Name("PerseusAllreduce").Device(kDevice), Collective<PERSEUS_ALLREDUCE>);
REGISTER_XLA_OP(Name("PerseusAllgather").Device(kDevice), Collective<PERSEUS_ALLGATHER>);
REGISTER_XLA_OP(Name("PerseusBroadcast").Device(kDevice), Collective<PERSEUS_BROADCAST>);
REGISTER_XLA_OP(Name("PerseusReducescatter").Device(kDevice), Collective<PERSEUS_REDUCESCATTER>);
REGISTER_XLA_OP(Name("PerseusSize").Device(kDevice), Number<Fact::kSize>);
REGISTER_XLA_OP(Name("PerseusRank").Device(kDevice), Number<Fact::kRank>);
REGISTER_XLA_OP(Name("PerseusLocalSize").Device(kDevice), Number<Fact::kLocalSize>);
REGISTER_XLA_OP(Name("PerseusLocalRank").Device(kDevice), Number<Fact::kLocalRank>);
REGISTER_XLA_OP(Name("PerseusProcessSetIncluded").Device(kDevice), Number<Fact::kIncluded>);

}  // namespace
}  // namespace perseus::tensorflow::xla

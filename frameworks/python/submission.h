// From the arguments of Operations.submit to a perseus_request. Needs the GIL, which it keeps: submitting does not
// block.
#pragma once

#include <Python.h>

#include <string>

#include "handle_table.h"
#include "perseus/perseus.h"
#include "tensor_view.h"

namespace perseus::python {

// Positions of Operations.submit's arguments.
enum SubmitArgument : int {
  kKind,
  kName,    // str, or None: a name made from a counter, which is used once
  kInput,   // tensor, tuple of tensors, or None
  kOutput,  // the same structure; None where the core owns the output
  kOp,
  kPrescale,
  kPostscale,
  kRoot,
  kSplits,  // sequence of int (alltoall), ranks (groups), or None
  kGroup,
  kSubmitArguments,
  // These may be left out: no gradient, sent as it is.
  kGradientOf = kSubmitArguments,
  kCodec,
  kCodecArgument,
  kMostArguments
};

constexpr const char* kShutDown = "Horovod has been shut down. Call hvd.init() to start again.";

// What is sent about gradients and codecs; all zero where it was left out.
struct GradientArguments {
  uint64_t gradient_of = 0;
  int codec = 0;
  double codec_argument = 0;
};

// Both fill in everything of `pending` but its number; false with an exception set.
// unnamed: for the name of a request that was given none.
bool submit_one(perseus_context* context, TensorReader* reader, PyObject* const* arguments, int64_t unnamed,
                const GradientArguments& gradient, Pending* pending);
bool submit_group(perseus_context* context, TensorReader* reader, PyObject* const* arguments, int64_t unnamed,
                  const GradientArguments& gradient, Pending* pending);

// What an allreduce that Python calls `name` is called in the core.
std::string allreduce_name(const std::string& name, bool grouped);

}  // namespace perseus::python

// From the arguments of Operations.submit to a perseus_request. Needs the GIL, which it keeps: submitting does not
// block.
#pragma once

#include <Python.h>

#include <array>
#include <string>

#include "handle_table.h"
#include "perseus/perseus.h"
#include "tensor_view.h"

namespace perseus::python {

// Where SubmitArguments keeps each of Operations.submit's arguments.
enum SubmitArgument : int {
  kKind,
  kName,    // str, or None: a name made from a counter, which is used once
  kInput,   // tensor, tuple of tensors, or None; of a receive, where the message goes
  kOutput,  // the same structure; None where the core owns the output
  // From here on they have keywords and may be left out.
  kPositional,
  kOp = kPositional,
  kPrescale,
  kPostscale,
  kRoot,
  kSplits,  // sequence of int (alltoall), ranks (groups), or None
  kGroup,
  kGradientOf,
  kCodec,
  kCodecArgument,
  kTag,
  kLearningRate,
  kMomentum,
  kTransient,  // bool: the name is used once, and not remembered
  kSubmitArguments
};

// All arguments of one call, borrowed, with defaults for those that were left out.
class SubmitArguments {
 public:
  // Makes the keywords and the defaults; false with an exception set. Once, when the module is made.
  static bool prepare();

  // positional: kind, name and input, and output where it is given. names: of what follows them, or null.
  // False with an exception set.
  bool read(PyObject* const* arguments, Py_ssize_t positional, PyObject* names);
  PyObject* const* all() const { return values_.data(); }

 private:
  std::array<PyObject*, kSubmitArguments> values_;
};

// The arguments about gradients and codecs; zero if they were left out.
struct GradientArguments {
  uint64_t gradient_of = 0;
  int codec = 0;
  double codec_argument = 0;
  double learning_rate = 0;
  double momentum = 0;
};

// Both fill in all of `pending` but its number; false with an exception set.
// unnamed: the number for the name of an unnamed request.
bool submit_one(perseus_context* context, TensorReader* reader, PyObject* const* arguments, int64_t unnamed,
                const GradientArguments& gradient, Pending* pending);
bool submit_group(perseus_context* context, TensorReader* reader, PyObject* const* arguments, int64_t unnamed,
                  const GradientArguments& gradient, Pending* pending);

// Is it the number of a send's or a receive's kind? They have no group, and need no name.
bool is_point_to_point(PyObject* kind);

// The core's name of an allreduce that Python calls `name`.
std::string allreduce_name(const std::string& name, bool grouped);

}  // namespace perseus::python

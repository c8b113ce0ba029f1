// The results of collectives whose shapes are known only afterwards. The caller owns them.
#pragma once

#include <cstdint>
#include <memory>

#include "engine_op.h"

namespace perseus::mxnet {

class Gathered {
 public:
  // Blocks until the op is done. Throws std::runtime_error if it failed, except for `skipped`.
  explicit Gathered(const perseus_mxnet_op& op);
  ~Gathered();
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

  // There are no results; an input of the op has an error.
  bool skipped() const { return outcome_.skipped; }
  perseus_output output(int index) const;

 private:
  std::shared_ptr<EngineOp> op_;
  Outcome outcome_;
};

}  // namespace perseus::mxnet

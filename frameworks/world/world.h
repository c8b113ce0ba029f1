// The context that this process's ops go to: attached at init(), detached at shutdown(). Thread-safe.
#pragma once

#include "perseus/perseus.h"

namespace perseus {

inline constexpr const char* kNotInitialized = "Horovod has not been initialized; use hvd.init().";

void attach_world(perseus_context* context);
// Ops fail from here on. Blocks until nothing uses the context, so shut that down first.
void detach_world();

// Keeps the context alive while it exists. Empty when there is none.
class WorldUse {
 public:
  WorldUse();
  ~WorldUse();
  WorldUse(const WorldUse&) = delete;
  WorldUse& operator=(const WorldUse&) = delete;

  perseus_context* context() const { return context_; }

 private:
  perseus_context* context_;
  int generation_ = 0;  // of the process that counts this use
};

}  // namespace perseus

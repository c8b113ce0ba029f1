// The functions that Python calls through ctypes. None of them needs the GIL.
#include "../world/world.h"
#include "completion.h"

extern "C" {

// Called once, before the first op runs. owned: TensorFlow is 2.22 or newer; see completion.h.
PERSEUS_EXPORT void perseus_tensorflow_set_convention(int owned) {
  using perseus::tensorflow::Convention;
  perseus::tensorflow::set_convention(owned != 0 ? Convention::kOwned : Convention::kBorrowed);
}

// Ops go to this context until perseus_tensorflow_detach.
PERSEUS_EXPORT void perseus_tensorflow_attach(perseus_context* context) { perseus::attach_world(context); }

// After perseus_context_shutdown and before perseus_context_destroy: blocks until no op uses the context.
PERSEUS_EXPORT void perseus_tensorflow_detach() { perseus::detach_world(); }

}  // extern "C"

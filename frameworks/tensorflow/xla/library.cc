// The functions that Python calls through ctypes, like those of libperseus_tensorflow.so.
#include "../../world/world.h"

extern "C" {

PERSEUS_EXPORT void perseus_xla_attach(perseus_context* context) { perseus::attach_world(context); }
PERSEUS_EXPORT void perseus_xla_detach() { perseus::detach_world(); }

}  // extern "C"

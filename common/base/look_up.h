// Functions of a library that was opened at run time.
#pragma once

#include <dlfcn.h>

#include <string>

#include "base/error.h"

namespace perseus {

// Throws Error(kIo), "`library` has no `name`: `advice`", where it has none.
template <typename Function>
void look_up(void* handle, const std::string& library, const char* name, const std::string& advice,
             Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (*function == nullptr) fail(ErrorKind::kIo, library + " has no " + name + ": " + advice);
}

}  // namespace perseus

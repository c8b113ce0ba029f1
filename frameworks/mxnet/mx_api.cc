// One dlsym for each function.
#include "mx_api.h"

#include <dlfcn.h>

namespace perseus::mxnet {
namespace {

Api loaded;

template <typename Function>
bool find(void* library, const char* name, Function* function, const char** missing) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) *missing = name;
  return *function != nullptr;
}

}  // namespace

bool load_api(void* library, const char** missing) {
  // Only builds with oneDNN have other layouts than rows and columns, and this function.
  const char* absent = nullptr;
  if (!find(library, "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv", &loaded.reorder, &absent))
    loaded.reorder = [](void*) {};
  return find(library, "MXGetLastError", &loaded.last_error, missing) &&
         find(library, "MXEnginePushAsyncND", &loaded.push_async, missing) &&
         find(library, "MXEnginePushSyncND", &loaded.push_sync, missing) &&
         find(library, "MXShallowCopyNDArray", &loaded.shallow_copy, missing) &&
         find(library, "MXNDArrayFree", &loaded.free_array, missing) &&
         find(library, "MXNDArrayGetShapeEx64", &loaded.shape, missing) &&
         find(library, "MXNDArrayGetDType", &loaded.dtype, missing) &&
         find(library, "MXNDArrayGetData", &loaded.data, missing);
}

const Api& api() { return loaded; }

}  // namespace perseus::mxnet

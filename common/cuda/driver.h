// The CUDA driver of this machine, opened at run time: the library links to nothing of CUDA, and machines without a GPU
// never look for it. Types are those of CUDA's stable driver API. Any thread.
#pragma once

#include <cstddef>
#include <string>

namespace perseus::cuda {

using Result = int;                  // CUresult
using Ordinal = int;                 // CUdevice
using Address = unsigned long long;  // CUdeviceptr
using Handle = void*;                // CUcontext, CUstream, CUevent, CUmodule, CUfunction

constexpr Result kSuccess = 0, kNotReady = 600;

struct CopyAttributes {
  int source_order = 1;  // the source is read in the order of the stream
  int source_hint[2] = {}, target_hint[2] = {};
  unsigned flags = 0;
};

struct Functions {
  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*device_count)(int* count);
  Result (*device_get)(Ordinal* device, int index);
  Result (*retain_primary)(Handle* context, Ordinal device);
  Result (*release_primary)(Ordinal device);
  Result (*push_context)(Handle context);
  Result (*pop_context)(Handle* context);
  Result (*exchange_capture_mode)(int* mode);
  Result (*device_uuid)(char* uuid, Ordinal device);  // 16 bytes
  Result (*pointer_attribute)(void* data, int attribute, Address pointer);
  Result (*stream_create)(Handle* stream, unsigned flags, int priority);
  Result (*stream_destroy)(Handle stream);
  Result (*stream_synchronize)(Handle stream);
  Result (*stream_wait)(Handle stream, Handle event, unsigned flags);
  Result (*stream_is_capturing)(Handle stream, int* status);
  Result (*event_create)(Handle* event, unsigned flags);
  Result (*event_destroy)(Handle event);
  Result (*event_record)(Handle event, Handle stream);
  Result (*event_query)(Handle event);
  Result (*event_synchronize)(Handle event);
  Result (*host_allocate)(void** memory, size_t bytes, unsigned flags);
  Result (*host_free)(void* memory);
  Result (*allocate)(Address* memory, size_t bytes);
  Result (*free)(Address memory);
  Result (*copy_to_host)(void* to, Address from, size_t bytes, Handle stream);
  Result (*copy_to_device)(Address to, const void* from, size_t bytes, Handle stream);
  Result (*copy_on_device)(Address to, Address from, size_t bytes, Handle stream);
  // Since CUDA 12.8, else null: many copies at once, in any order between them. Not for the legacy stream.
  Result (*copy_batch)(Address* to, Address* from, size_t* bytes, size_t count, CopyAttributes* attributes,
                       size_t* first_of_attributes, size_t attributes_count, size_t* failed, Handle stream);
  Result (*load_module)(Handle* module, const void* image);
  Result (*unload_module)(Handle module);
  Result (*find_function)(Handle* function, Handle module, const char* name);
  Result (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void** parameters,
                   void** extra);
  Result (*error_name)(Result code, const char** name);
  Result (*error_text)(Result code, const char** text);
};

class Driver {
 public:
  // The process's driver, opened by the first call. Throws Error(kIo) where there is none or where it is too old, and
  // says what to do.
  static const Driver& get();

  const Functions& call() const { return functions_; }
  int version() const { return version_; }  // 12040 = CUDA 12.4
  // That this process sees. Initialises the driver, which processes that are forked later cannot use any more. Throws
  // as check() does.
  int devices() const;
  // The number of the one whose memory this is; throws Error(kInvalidArgument) if it is that of none.
  int device_of(const void* pointer) const;
  // Throws Error(kIo) with the driver's own words, unless the code is a success. `what` failed.
  void check(Result code, const char* what) const;

 private:
  explicit Driver(const std::string& path);

  const std::string path_;
  void* library_ = nullptr;  // stays open: frameworks use it, too
  Functions functions_{};
  int version_ = 0;
};

}  // namespace perseus::cuda

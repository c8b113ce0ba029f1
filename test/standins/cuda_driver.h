// What tests ask of the stand-in for NVIDIA's driver beyond the driver's own functions.
#pragma once

#include <cstddef>

extern "C" {
// ---- of the driver, with the types of its header spelt out ----
int cuMemAlloc_v2(unsigned long long* address, size_t bytes);
int cuMemFree_v2(unsigned long long address);
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority);
int cuStreamDestroy_v2(void* stream);
int cuStreamSynchronize(void* stream);
int cuStreamBeginCapture_v2(void* stream, int mode);
int cuStreamEndCapture(void* stream, void** graph);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxPushCurrent_v2(void* context);
int cuCtxPopCurrent_v2(void** context);
int cuDeviceGetUuid_v2(char* uuid, int device);  // 16 bytes
int cuPointerGetAttribute(void* data, int attribute, unsigned long long address);
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void* stream);

// ---- of the stand-in ----
// The memory behind an address of a device: what a kernel reads and writes. The address itself is protected, so that a
// host that touches it ends with a segmentation fault.
void* standin_view(unsigned long long address);
// The memory behind so many bytes from an address on that a kernel may use: of a device, or page-locked memory of the
// host. Null: they are not all of one allocation.
void* standin_kernel_memory(unsigned long long address, size_t bytes);
// From now on every call and every event of the device fails with this code, as after a kernel's illegal access; 0 ends
// that.
void standin_break(int code);
// After so many more allocations, page-locked memory is used up.
void standin_allow_host_memory(int allocations);
// Likewise, memory of devices.
void standin_allow_device_memory(int allocations);
// Every work of a stream is late by a random time of up to so many microseconds.
void standin_set_delay(int microseconds);
static const int kStandinDelay = 200;  // at first
// How often a function that blocks the host was called.
int standin_blocking_calls();
// The device of this thread's current context; -1: it has none.
int standin_current_device();
// The device of a stream; -1: there is no such stream.
int standin_stream_device(void* stream);
// CU_STREAM_PER_THREAD, which then is one stream for all threads.
void* standin_per_thread_stream();
// How often functions were called that record an event, wait for one, copy or launch a kernel.
int standin_calls();
void standin_note_call();
// How often kernels were launched that encode chunks of gradients.
int standin_chunk_launches();
}

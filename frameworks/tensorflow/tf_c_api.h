// The part of TensorFlow's C API that Perseus uses, declared here so that no TensorFlow header is needed to build.
//
// The functions are the same in TensorFlow 2.15 to 2.22. CMake makes a library to link against from the names in this
// file; at run time they come from the libtensorflow_framework.so.2 that the process has loaded.
// Source: tensorflow/c/{ops,kernels,tf_tensor,tf_status,tf_datatype}.h.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// enum TF_DataType.
inline constexpr int TF_FLOAT = 1;
inline constexpr int TF_DOUBLE = 2;
inline constexpr int TF_INT32 = 3;
inline constexpr int TF_UINT8 = 4;
inline constexpr int TF_INT16 = 5;
inline constexpr int TF_INT8 = 6;
inline constexpr int TF_INT64 = 9;
inline constexpr int TF_BOOL = 10;
inline constexpr int TF_BFLOAT16 = 14;
inline constexpr int TF_UINT16 = 17;
inline constexpr int TF_HALF = 19;

// enum TF_Code.
inline constexpr int TF_OK = 0;
inline constexpr int TF_UNKNOWN = 2;
inline constexpr int TF_INVALID_ARGUMENT = 3;
inline constexpr int TF_RESOURCE_EXHAUSTED = 8;
inline constexpr int TF_FAILED_PRECONDITION = 9;
inline constexpr int TF_ABORTED = 10;
inline constexpr int TF_INTERNAL = 13;

struct TF_AsyncOpKernelDoneCallback;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeInferenceContext;
struct TF_Status;
struct TF_Tensor;
struct TF_StringView {
  const char* data;
  size_t len;
};

TF_Status* TF_NewStatus();
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, int code, const char* message);
int TF_GetCode(const TF_Status*);
const char* TF_Message(const TF_Status*);

// Takes ownership of the data, and copies it at once if it is not aligned as TensorFlow requires.
TF_Tensor* TF_NewTensor(int dtype, const int64_t* dims, int dim_count, void* data, size_t bytes,
                        void (*deallocator)(void* data, size_t bytes, void* arg), void* arg);
TF_Tensor* TF_AllocateTensor(int dtype, const int64_t* dims, int dim_count, size_t bytes);
void TF_DeleteTensor(TF_Tensor*);
int TF_TensorType(const TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int index);
size_t TF_TensorByteSize(const TF_Tensor*);
void* TF_TensorData(const TF_Tensor*);

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* op);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char* spec);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char* spec);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char* spec);
void TF_OpDefinitionBuilderSetIsStateful(TF_OpDefinitionBuilder*, bool);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder*,
                                                     void (*)(TF_ShapeInferenceContext*, TF_Status*));
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*);
// Takes the builder.
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);

TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
TF_KernelBuilder* TF_NewAsyncKernelBuilder(const char* op, const char* device,
                                           void* (*create)(TF_OpKernelConstruction*),
                                           void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*),
                                           void (*destroy)(void*));
// Takes the builder.
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder*, TF_Status*);

bool TF_OpKernelConstruction_HasAttr(TF_OpKernelConstruction*, const char* name, TF_Status*);
void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction*, const char* name, int64_t* value, TF_Status*);
void TF_OpKernelConstruction_GetAttrBool(TF_OpKernelConstruction*, const char* name, unsigned char* value, TF_Status*);
void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction*, const char* name, int32_t* list_size,
                                         int32_t* total_size, TF_Status*);
// Writes no NUL.
void TF_OpKernelConstruction_GetAttrString(TF_OpKernelConstruction*, const char* name, char* value, size_t capacity,
                                           TF_Status*);
TF_StringView TF_OpKernelConstruction_GetName(TF_OpKernelConstruction*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);

int TF_NumInputs(TF_OpKernelContext*);
// The caller gets its own reference to the tensor.
void TF_GetInput(TF_OpKernelContext*, int index, TF_Tensor** tensor, TF_Status*);
// *forwarded: the input whose memory the output has, -1 for none.
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext*, const int* candidates, int candidate_count,
                                           int output_index, const int64_t* dims, int dim_count, int* forwarded,
                                           TF_Status*);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext*, int index, int dtype, const int64_t* dims, int dim_count,
                             size_t bytes, TF_Status*);
void TF_SetOutput(TF_OpKernelContext*, int index, const TF_Tensor*, TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);
void TF_RunAsyncOpKernelDoneCallback(TF_AsyncOpKernelDoneCallback*);

}  // extern "C"

// NCCL's functions as the stand-in for it has them, with the types of its header of 2.18 spelt out, and what tests ask
// of the stand-in beyond them.
#pragma once

#include <climits>
#include <cstddef>

extern "C" {
// ---- of NCCL ----
enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclDataType_t : int {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};
enum ncclRedOp_t : int { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 };

struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig_t {
  size_t size = sizeof(ncclConfig_t);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = INT_MIN;  // not set, which is 1
  int cgaClusterSize = INT_MIN;
  int minCTAs = INT_MIN;
  int maxCTAs = INT_MIN;
  const char* netName = nullptr;
  int splitShare = INT_MIN;
};
typedef struct ncclComm* ncclComm_t;

ncclResult_t ncclGetVersion(int* version);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);  // valid until this thread asks again
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, void* stream);
// `count`: what a rank receives.
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, void* stream);
// `count`: what a rank sends.
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           void* stream);

// ---- of the stand-in ----
// From now on every communicator that this process begins to make completes with this code; 0 ends that.
void standin_nccl_fail_init(int code);
// From now on ncclCommGetAsyncError gives this code for all communicators of this process; 0 ends that.
void standin_nccl_break(int code);
// While on, no collective of this process goes on or ends, unless it is aborted.
void standin_nccl_hold(int on);
// While on, ncclCommAbort does not return, as where something else on the GPU never ends.
void standin_nccl_hold_aborts(int on);
// How many collectives this process has begun.
int standin_nccl_calls();
// How many communicators this process has.
int standin_nccl_communicators();
}

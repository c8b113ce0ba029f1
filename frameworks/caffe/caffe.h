/* What a Caffe solver needs of Perseus: libperseus-caffe.so, on top of the core's C ABI and with its conventions.
 *
 * An exchange is a process's place in the world that its launcher describes; it belongs to one thread. Buffers of the
 * host only. Requests of the same name on all ranks belong together, whatever order they are started in.
 */
#ifndef PERSEUS_CAFFE_H_
#define PERSEUS_CAFFE_H_

#include "perseus/perseus.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct perseus_exchange perseus_exchange;

/* Joins the world of perseusrun, mpirun or srun; without a launcher, a world of one. Blocks until every rank is there
 * or the start timeout passes. */
PERSEUS_EXPORT perseus_code perseus_exchange_create(perseus_exchange** exchange);
/* Leaves the world, which ends what is in progress on every rank, and frees everything. NULL is fine. */
PERSEUS_EXPORT void perseus_exchange_destroy(perseus_exchange* exchange);

PERSEUS_EXPORT int perseus_exchange_rank(const perseus_exchange* exchange);
PERSEUS_EXPORT int perseus_exchange_size(const perseus_exchange* exchange);
PERSEUS_EXPORT int perseus_exchange_local_rank(const perseus_exchange* exchange);

/* Gives all ranks what rank 0 has in `data`: `count` elements, the same number everywhere. Blocks. */
PERSEUS_EXPORT perseus_code perseus_exchange_broadcast(perseus_exchange* exchange, const char* name, void* data,
                                                       int64_t count, perseus_dtype dtype);

/* Starts to average a gradient over all ranks, in place; settings for gradients apply. Returns at once: the buffer
 * belongs to the exchange until perseus_exchange_finish. */
PERSEUS_EXPORT perseus_code perseus_exchange_average(perseus_exchange* exchange, const char* name, void* data,
                                                     int64_t count, perseus_dtype dtype);
/* The same for the largest of all ranks' numbers, element by element; no settings apply. */
PERSEUS_EXPORT perseus_code perseus_exchange_largest(perseus_exchange* exchange, const char* name, int32_t* data,
                                                     int64_t count);
/* Waits until everything started is done and returns the first failure. `applies` is non-zero when the gradients are
 * averages to be applied; zero, on all ranks, when they were added to a sum (PERSEUS_ACCUMULATE_N_STEPS) or have a NaN
 * that is to be skipped: then their buffers mean nothing. */
PERSEUS_EXPORT perseus_code perseus_exchange_finish(perseus_exchange* exchange, int* applies);

/* Counts a step that begins. Non-zero, on all ranks alike, after every N-th step (PERSEUS_PARAMETER_CHECK_N_STEPS):
 * then all must call perseus_exchange_compare. Zero where there is nobody to compare with. */
PERSEUS_EXPORT int perseus_exchange_compares(perseus_exchange* exchange);

typedef struct perseus_parameter {
  const char* name;
  const void* data;
  int64_t bytes;
} perseus_parameter;
/* Compares what all ranks have learned, bit by bit: `count` parameters, in the same order everywhere. Blocks.
 * PERSEUS_MISMATCH on all ranks, with the first parameter that differs and its ranks, unless all are equal; the world
 * stays usable. */
PERSEUS_EXPORT perseus_code perseus_exchange_compare(perseus_exchange* exchange, const perseus_parameter* parameters,
                                                     int count);

/* perseus_residual_read and perseus_residual_write for the averages of residual->name; its other fields that are those
 * of a request are set here, with struct_size. Not between perseus_exchange_average and perseus_exchange_finish. */
PERSEUS_EXPORT perseus_code perseus_exchange_residual_read(perseus_exchange* exchange, perseus_residual* residual);
PERSEUS_EXPORT perseus_code perseus_exchange_residual_write(perseus_exchange* exchange, perseus_residual* residual);

/* Of the calling thread's last call that failed, "" before any. */
PERSEUS_EXPORT const char* perseus_exchange_error_message(void);

#ifdef __cplusplus
}
#endif
#endif  // PERSEUS_CAFFE_H_

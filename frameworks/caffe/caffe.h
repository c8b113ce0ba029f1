/* The calls that a Caffe solver needs: libperseus-caffe.so, on top of the core's C ABI and with its conventions.
 *
 * An exchange is this process's membership in the world that its launcher describes. It belongs to one thread. Buffers
 * must lie in host memory. Requests are matched across ranks by name, in whatever order ranks start them.
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
/* Leaves the world, which ends operations in progress on every rank, and frees everything. `exchange` may be NULL. */
PERSEUS_EXPORT void perseus_exchange_destroy(perseus_exchange* exchange);

PERSEUS_EXPORT int perseus_exchange_rank(const perseus_exchange* exchange);
PERSEUS_EXPORT int perseus_exchange_size(const perseus_exchange* exchange);
PERSEUS_EXPORT int perseus_exchange_local_rank(const perseus_exchange* exchange);

/* Another training begins: drops the sums and residuals that an earlier one has left, and counts steps from 0. To be
 * called by all ranks, and before perseus_exchange_residual_write. */
PERSEUS_EXPORT void perseus_exchange_begin_training(perseus_exchange* exchange);

/* Copies rank 0's `data` to all ranks: `count` elements, the same number everywhere. Blocks. */
PERSEUS_EXPORT perseus_code perseus_exchange_broadcast(perseus_exchange* exchange, const char* name, void* data,
                                                       int64_t count, perseus_dtype dtype);

/* The learning rate of the step that will apply the gradients that are averaged from now on; see
 * perseus_request.learning_rate. 0 = not known, as it is until the first call. */
PERSEUS_EXPORT void perseus_exchange_set_learning_rate(perseus_exchange* exchange, double learning_rate);
/* Starts to average a gradient, in place: over all ranks, or over this host's after perseus_exchange_begin_rotation.
 * `shape` has `dims` extents, from the outermost on. The settings for gradients apply. Returns at once: the buffer
 * belongs to the exchange until perseus_exchange_finish. */
PERSEUS_EXPORT perseus_code perseus_exchange_average(perseus_exchange* exchange, const char* name, void* data,
                                                     const int* shape, int dims, perseus_dtype dtype);
/* Starts to compute the largest of all ranks' numbers, element by element and in place; no settings apply. */
PERSEUS_EXPORT perseus_code perseus_exchange_largest(perseus_exchange* exchange, const char* name, int32_t* data,
                                                     int64_t count);
/* Waits until everything that was started is done, and returns the first failure. `applies` is non-zero if the
 * gradients are averages to be applied. It is zero on all ranks if the gradients were added to a sum
 * (PERSEUS_ACCUMULATE_N_STEPS) or have a NaN that makes all ranks skip the step; then their buffers have no meaning. */
PERSEUS_EXPORT perseus_code perseus_exchange_finish(perseus_exchange* exchange, int* applies);

/* PERSEUS_DOWNSAMPLE_N_ELEMENTS=N: each step averages another N-th of the parameters instead of gradients. `rotates` is
 * non-zero on all ranks if so: from now on gradients stay inside hosts, and all ranks must call
 * perseus_exchange_take_turn and perseus_exchange_make_equal. It is zero if N is 1 or if one host has all ranks. What
 * an earlier training has under way is dropped. All ranks call this before the first gradient, with equal parameters.
 * Blocks. PERSEUS_INVALID_ARGUMENT together with PERSEUS_PARAMETER_CHECK_N_STEPS. */
PERSEUS_EXPORT perseus_code perseus_exchange_begin_rotation(perseus_exchange* exchange, int* rotates);

typedef struct perseus_values {
  void* const* data; /* of each tensor; the library keeps no pointer after a call */
  const int64_t* counts;
  int tensor_count;    /* like the counts the same on all ranks, in every call */
  perseus_dtype dtype; /* PERSEUS_FLOAT32 or PERSEUS_FLOAT64, of all tensors */
} perseus_values;
/* Starts to average a part of the parameters, and waits for the part that the last call has started: adds what its
 * average differs by from what this rank has sent. To be called after the update, in all steps whose gradients apply
 * and in no other, unless perseus_exchange_make_equal is called then. Called before the update, as older patches of
 * Caffe do, it averages parameters that are a step older. */
PERSEUS_EXPORT perseus_code perseus_exchange_take_turn(perseus_exchange* exchange, const perseus_values* parameters);
/* Gives the parameters the average of all ranks, with the same bits everywhere. All ranks call this after the same
 * step. Blocks. */
PERSEUS_EXPORT perseus_code perseus_exchange_make_equal(perseus_exchange* exchange, const perseus_values* parameters);

/* Counts a step that begins. Returns non-zero on all ranks after every N-th step (PERSEUS_PARAMETER_CHECK_N_STEPS):
 * then all ranks must call perseus_exchange_compare. Returns zero in a world of one rank. */
PERSEUS_EXPORT int perseus_exchange_compares(perseus_exchange* exchange);

typedef struct perseus_parameter {
  const char* name;
  const void* data;
  int64_t bytes;
} perseus_parameter;
/* Compares `count` parameters, in the same order everywhere, bit by bit over all ranks. Blocks. If they differ, returns
 * PERSEUS_MISMATCH on all ranks, with the first parameter that differs and its ranks; the world stays usable. */
PERSEUS_EXPORT perseus_code perseus_exchange_compare(perseus_exchange* exchange, const perseus_parameter* parameters,
                                                     int count);

/* perseus_residual_read and perseus_residual_write for the averages of residual->name. They set struct_size and all
 * other fields of the request. Not to be called between perseus_exchange_average and perseus_exchange_finish. */
PERSEUS_EXPORT perseus_code perseus_exchange_residual_read(perseus_exchange* exchange, perseus_residual* residual);
PERSEUS_EXPORT perseus_code perseus_exchange_residual_write(perseus_exchange* exchange, perseus_residual* residual);

/* Describes the calling thread's last failed call; "" before the first one. */
PERSEUS_EXPORT const char* perseus_exchange_error_message(void);

#ifdef __cplusplus
}
#endif
#endif  // PERSEUS_CAFFE_H_

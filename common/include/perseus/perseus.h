/* The C ABI of Perseus: the only thing adapters include.
 *
 * Conventions
 * - Opaque types, functions named perseus_<noun>_<verb>. Every call that can fail returns a perseus_code; the message
 * of the calling thread's last failure is perseus_error_message(). Nothing throws across this boundary.
 * - Strings are NUL-terminated UTF-8; returned ones stay valid until the calling thread's next call unless said
 * otherwise.
 * - Structs start with `struct_size` = sizeof of the caller's version; zero-initialise them. Fields are only ever added
 *   at the end, and 0 means what it meant before a field was there. The library reads and writes no more of a struct
 *   than its size; a field that is set but unknown to the library is PERSEUS_INVALID_ARGUMENT. perseus_tensor and
 *   perseus_store_place have no size and never change.
 * - A context may be used by any number of threads. Several contexts (several ranks) may live in one process.
 * - In a process that was forked after perseus_context_create, a context can be destroyed and asked for ranks and
 *   sizes; every other call fails at once with PERSEUS_ABORTED, or with what it returns for an unknown handle or group.
 * - Buffers belong to the caller and must stay valid and untouched until the handle is done: a handle that is done,
 *   with success or error, is no longer used by any thread or peer.
 */
#ifndef PERSEUS_PERSEUS_H_
#define PERSEUS_PERSEUS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PERSEUS_EXPORT __attribute__((visibility("default")))

typedef enum perseus_code {
  PERSEUS_OK = 0,
  PERSEUS_INVALID_ARGUMENT = 1, /* the request makes no sense; nothing was started */
  PERSEUS_MISMATCH = 2,         /* ranks disagree about this tensor; the job goes on */
  PERSEUS_IO = 3,               /* a link, file or segment failed */
  PERSEUS_TIMEOUT = 4,          /* a deadline passed */
  PERSEUS_ABORTED = 5,          /* the group failed or was shut down; initialise again to go on */
  PERSEUS_INTERNAL = 6,         /* a bug */
  PERSEUS_IN_PROGRESS = 7,      /* perseus_handle_wait: not done within the given time; not a failure */
  PERSEUS_NAN = 8               /* a rank's gradient has a NaN and the job asks for an error then; the job goes on */
} perseus_code;

typedef enum perseus_dtype {
  PERSEUS_FLOAT16 = 0,
  PERSEUS_BFLOAT16 = 1,
  PERSEUS_FLOAT32 = 2,
  PERSEUS_FLOAT64 = 3,
  PERSEUS_UINT8 = 4,
  PERSEUS_INT8 = 5,
  PERSEUS_INT16 = 6,
  PERSEUS_INT32 = 7,
  PERSEUS_INT64 = 8,
  PERSEUS_BOOL = 9
} perseus_dtype;

/* Horovod's numbers. */
typedef enum perseus_reduce_op {
  PERSEUS_AVERAGE = 0,
  PERSEUS_SUM = 1,
  PERSEUS_ADASUM = 2,
  PERSEUS_MIN = 3,
  PERSEUS_MAX = 4,
  PERSEUS_PRODUCT = 5
} perseus_reduce_op;

/* What elements look like between hosts, see docs/algorithms.md. Lossy ones keep what they hold back under the
 * request's name (and gradient_of), so the name should come again. */
typedef enum perseus_codec {
  PERSEUS_CODEC_SETTINGS = 0, /* gradients: as the settings say; others: exact */
  PERSEUS_CODEC_EXACT = 1,
  PERSEUS_CODEC_FLOAT16 = 2,
  PERSEUS_CODEC_BFLOAT16 = 3,
  PERSEUS_CODEC_INT8 = 4,
  PERSEUS_CODEC_TOP_K = 5,
  PERSEUS_CODEC_ROTATE = 6,
  /* EXACT, FLOAT16, INT8 or TOP_K (as the settings say), whichever is fastest by perseus_group_speeds */
  PERSEUS_CODEC_AUTO = 7
} perseus_codec;

typedef enum perseus_kind {
  PERSEUS_ALLREDUCE = 0,
  PERSEUS_ALLGATHER = 1,
  PERSEUS_BROADCAST = 2,
  PERSEUS_ALLTOALL = 3,
  PERSEUS_REDUCESCATTER = 4,
  PERSEUS_BARRIER = 5,
  PERSEUS_ADD_GROUP = 6,
  PERSEUS_REMOVE_GROUP = 7,
  /* "No more from me": until all ranks of the group have joined, this one gives zeros to every allreduce of the others.
   * Other collectives of theirs fail. The output's `size` is the rank that joined last. */
  PERSEUS_JOIN = 8
} perseus_kind;

PERSEUS_EXPORT const char* perseus_version(void);
/* Of the calling thread's last failed call, "" before any. */
PERSEUS_EXPORT const char* perseus_error_message(void);

/* ---- configuration: the one table behind every variable ------------------------------------------------------- */

typedef struct perseus_config_variable {
  size_t struct_size;
  const char* name;          /* "PERSEUS_ALLREDUCE_STREAMS" */
  const char* aliases;       /* comma-separated, may be "" */
  const char* type;          /* "int", "float", "bool", "string", "choice" */
  const char* default_value; /* as text, "" = unset */
  const char* allowed;       /* "1..12", "0|1|2", "" = anything */
  const char* help;
} perseus_config_variable;

PERSEUS_EXPORT int perseus_config_count(void);
/* The strings live as long as the process. */
PERSEUS_EXPORT perseus_code perseus_config_describe(int index, perseus_config_variable* variable);
/* Checks every variable of the environment as perseus_context_create would. */
PERSEUS_EXPORT perseus_code perseus_config_check(void);

/* ---- rendezvous ------------------------------------------------------------------------------------------------- */

typedef struct perseus_store_server perseus_store_server;

/* A key-value server through which ranks find each other; requests prove knowledge of `secret` (secret_size bytes,
 * not 0).
 * host "" = every interface, port 0 = any; next_free != 0 moves on to the next free port when it is taken. */
PERSEUS_EXPORT perseus_code perseus_store_server_create(const char* host, int port, int next_free, const void* secret,
                                                        size_t secret_size, perseus_store_server** server);
PERSEUS_EXPORT int perseus_store_server_port(const perseus_store_server* server);
PERSEUS_EXPORT void perseus_store_server_destroy(perseus_store_server* server);

/* ---- context ---------------------------------------------------------------------------------------------------- */

typedef struct perseus_context perseus_context;

typedef struct perseus_context_options {
  size_t struct_size;
  int rank, size;
  int local_rank, local_size; /* on this host; local_size 0 = let Perseus find out by host name */
  int cross_rank, cross_size; /* this host's index among those that own the same local rank; 0 likewise */
  const char* store_host;     /* server made by perseus_store_server_create; may be NULL when size is 1 */
  int store_port;
  const void* secret;
  size_t secret_size;
  const char* job; /* prefix of the store's keys, NULL = "world" */
  uint32_t epoch;  /* counts the worlds built in this job; equal on all ranks */
  /* NULL-terminated NAME=VALUE strings that override the environment, NULL = none. */
  const char* const* overrides;
  /* Ranks as threads of one process: ranks that pass the same non-NULL name meet in memory, without a store. */
  const char* memory_world;
  /* Asked about every 100 ms while perseus_context_create blocks; non-zero gives up. May be NULL. */
  int (*interrupted)(void*);
  void* interrupted_arg;
} perseus_context_options;

/* Blocks until every rank is there or the start timeout passes (the message names the missing ranks). */
PERSEUS_EXPORT perseus_code perseus_context_create(const perseus_context_options* options, perseus_context** context);
/* The same for a process that knows nothing of its world: rank, size and the way to the others are those of whatever
 * launched it (perseusrun, mpirun of Open MPI or MPICH, srun, torchrun's variables); without a launcher, a world of
 * one. Nothing but the environment and, for Open MPI, its libpmix.so.2 is used, which is opened then. What ranks find
 * out once serves all worlds of the process; rank 0's process runs the store until it ends. `job` as above; the epoch
 * counts this process's calls for that job. Under mpirun this process must not initialise MPI afterwards, under MPICH's
 * not before either. Errors: PERSEUS_INVALID_ARGUMENT for a variable that is wrong or missing, PERSEUS_TIMEOUT when
 * ranks stay away for HOROVOD_START_TIMEOUT, PERSEUS_IO where the launcher does not answer. */
PERSEUS_EXPORT perseus_code perseus_context_create_launched(const char* job, perseus_context** context);
typedef struct perseus_store_place {
  const char* host; /* "" and port 0: a world of one rank, without a store */
  int port;
  const void* secret;
  size_t secret_size;
} perseus_store_place;
/* Where that store is, for processes that build their worlds by perseus_context_create. All ranks must ask, as they
 * must create; the same conditions and errors. The texts stay until the process ends. */
PERSEUS_EXPORT perseus_code perseus_launched_store(perseus_store_place* place);
/* Tells all ranks; pending operations everywhere end with PERSEUS_ABORTED "Horovod has been shut down…". Operations
 * already under way on all ranks are finished first. Safe to call twice. */
PERSEUS_EXPORT void perseus_context_shutdown(perseus_context* context);
/* Shuts down if that was not done, waits for threads, frees everything; handles die with it. */
PERSEUS_EXPORT void perseus_context_destroy(perseus_context* context);

/* Non-zero in a process that was forked after the context was created: no thread works on it here. */
PERSEUS_EXPORT int perseus_context_forked(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_rank(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_size(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_local_rank(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_local_size(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_cross_rank(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_cross_size(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_is_homogeneous(const perseus_context* context);
/* A variable as this context has read it: the number, 0 or 1, or the place among its choices; -1 for others. */
PERSEUS_EXPORT int64_t perseus_context_setting(const perseus_context* context, const char* name);
/* Non-zero once the world has failed or was shut down (by any rank); `reason` may be NULL, else receives the text. */
PERSEUS_EXPORT int perseus_context_failed(const perseus_context* context, const char** reason);
/* "none", "mem", "shm" or "tcp": how bytes reach `peer`. */
PERSEUS_EXPORT const char* perseus_context_transport(const perseus_context* context, int peer);

typedef struct perseus_stats {
  size_t struct_size;
  uint64_t shm_bytes_sent, tcp_bytes_sent; /* headers included; mem counts as shm */
  uint64_t shm_bytes_received, tcp_bytes_received;
  uint64_t rounds;        /* negotiation rounds finished */
  uint64_t buckets;       /* fused executions */
  uint64_t operations;    /* requests finished */
  uint64_t sleeps;        /* times a thread went to sleep waiting for peers */
  uint64_t staging_bytes; /* memory held beyond the caller's tensors */
  uint64_t messages;      /* sent to negotiate */
} perseus_stats;
PERSEUS_EXPORT perseus_code perseus_context_stats(const perseus_context* context, perseus_stats* stats);

/* ---- operations ------------------------------------------------------------------------------------------------- */

typedef int64_t perseus_handle; /* > 0 */

typedef struct perseus_tensor {
  const void* input;
  void* output;         /* may equal input. NULL for allgather, alltoall: fetch with perseus_handle_output */
  const int64_t* shape; /* copied by the call */
  int ndim;
  perseus_dtype dtype;
} perseus_tensor;

typedef struct perseus_request {
  size_t struct_size;
  perseus_kind kind;
  int group;                     /* 0 = the world */
  const char* name;              /* pairs requests across ranks, whatever order they are submitted in */
  const perseus_tensor* tensors; /* 1 for a plain operation, more = grouped: ready, executed and finished together */
  int tensor_count;
  perseus_reduce_op op;       /* allreduce, reducescatter */
  double prescale, postscale; /* 1.0 = nothing; 0-initialised requests must set them */
  int root;                   /* broadcast: a GLOBAL rank */
  const int64_t* splits;      /* alltoall: rows of dimension 0 for each rank of the group; NULL = equal parts */
  int split_count;
  int priority;     /* higher is executed first among what is ready together */
  int transient;    /* the name will not come again: do not remember it */
  const int* ranks; /* PERSEUS_ADD_GROUP: members; PERSEUS_REMOVE_GROUP: ranks[0] = group id */
  int rank_count;
  /* 0 = an ordinary operation. Else this is a gradient of the optimizer (tape, store, …) for which the caller chose
   * this number: an allreduce of floating-point tensors, or an allgather of a sparse gradient's values, which
   * PERSEUS_ACCUMULATE_N_STEPS > 1 refuses. Settings for gradients apply, see perseus_handle_gradient. */
  uint64_t gradient_of;
  int codec; /* a perseus_codec: sums and averages only. float16 and bfloat16 tensors are encoded as float32 by what is
              * smaller than them, float64 ones where the codec is not SETTINGS; others travel as they are */
  double codec_argument; /* PERSEUS_CODEC_TOP_K: the fraction of elements, ROTATE: N; 0 = as the settings say */
  /* NULL, or called once when the handle is done, on whichever thread makes progress: that may be the submitting one,
   * before perseus_request_submit returns. It must not block: no waiting for handles in progress, no shutdown or
   * destruction of the context. It may read and release the handle and submit requests. Never called for a request that
   * perseus_request_submit refused. */
  void (*done)(void* done_arg, perseus_handle handle);
  void* done_arg;
  /* NULL, or why this rank cannot do what the others submit under this name: they get it as a PERSEUS_MISMATCH, and so
   * does this rank. Tensors and splits are not looked at. */
  const char* refusal;
} perseus_request;

/* Hands the request over without copying tensors; returns at once. */
PERSEUS_EXPORT perseus_code perseus_request_submit(perseus_context* context, const perseus_request* request,
                                                   perseus_handle* handle);
/* 1 done (also with an error), 0 in progress, -1 unknown handle. Makes progress itself if nobody else does. */
PERSEUS_EXPORT int perseus_handle_poll(perseus_context* context, perseus_handle handle);
/* Waits up to timeout_ms (-1 = for ever). PERSEUS_IN_PROGRESS when it passes, else the operation's outcome. */
PERSEUS_EXPORT perseus_code perseus_handle_wait(perseus_context* context, perseus_handle handle, int timeout_ms);

/* What became of a gradient whose handle is done without an error. Only when all gradients of a step are REDUCED may
 * the step be applied; it is the same on every rank of the group. */
typedef enum perseus_gradient {
  PERSEUS_GRADIENT_REDUCED = 0, /* the output is the reduction: of the sums when PERSEUS_ACCUMULATE_N_STEPS > 1 */
  PERSEUS_GRADIENT_HELD = 1,    /* added to a sum inside the context; nothing was sent, the output is untouched */
  PERSEUS_GRADIENT_SKIPPED = 2  /* reduced, but some rank had a NaN and PERSEUS_ALLREDUCE_NANCHECK_ACTION is skip */
} perseus_gradient;
/* One of perseus_gradient; -1 for a handle that is unknown or in progress. */
PERSEUS_EXPORT int perseus_handle_gradient(perseus_context* context, perseus_handle handle);
/* Drops the sums of perseus_request.gradient_of and counts its steps from the start. */
PERSEUS_EXPORT void perseus_gradients_forget(perseus_context* context, uint64_t gradient_of);

/* What lossy codecs hold back, on this rank, of the requests of one name: for every element of its tensors, end to end,
 * what is added to this rank's next gradient; then as many that are added to the next results of which this rank is the
 * owner. */
typedef struct perseus_residual {
  size_t struct_size;
  uint64_t gradient_of; /* as in the request, like the next two */
  int group;
  const char* name;
  float* data;     /* `count` numbers, the caller's; NULL = only say how many there are */
  size_t count;    /* two for each element; 0 = nothing is held back */
  uint64_t layout; /* names the places of ranks among which chunks were dealt out */
} perseus_residual;
/* Fills data, count and layout. PERSEUS_INVALID_ARGUMENT where `count` is not the number there is, and while a request
 * of that name is in progress. */
PERSEUS_EXPORT perseus_code perseus_residual_read(perseus_context* context, perseus_residual* residual);
/* Takes the place of what is held back. With the next request of the name it goes on as if it had never been away, or,
 * where the layout is another one now, or the request's codec keeps nothing, it is sent as it is, once. */
PERSEUS_EXPORT perseus_code perseus_residual_write(perseus_context* context, const perseus_residual* residual);
/* The next request of every name that a lossy codec has held something back of is sent with all that is held, as
 * float32, on all ranks, whichever of them call this. Nothing is held back of it afterwards. */
PERSEUS_EXPORT perseus_code perseus_residuals_flush(perseus_context* context);

/* Allgather, alltoall: tensor `index` of the result, owned by the handle until it is released. shape: ndim values.
 * add_group: ndim 0 and `size` carries the new group's id; join: the same with the rank that joined last. */
typedef struct perseus_output {
  size_t struct_size;
  void* data;
  size_t size; /* bytes */
  const int64_t* shape;
  int ndim;
  const int64_t* received_splits; /* alltoall: rows received from each rank */
  int received_split_count;
} perseus_output;
PERSEUS_EXPORT perseus_code perseus_handle_output(perseus_context* context, perseus_handle handle, int index,
                                                  perseus_output* output);
/* Detaches the buffer `data` of perseus_handle_output from the handle; free it with perseus_buffer_free. */
PERSEUS_EXPORT void* perseus_handle_take_output(perseus_context* context, perseus_handle handle, int index);
PERSEUS_EXPORT void perseus_buffer_free(void* data);
/* Forgets a handle that is done. Releasing one in progress, or a second time, is an error. */
PERSEUS_EXPORT perseus_code perseus_handle_release(perseus_context* context, perseus_handle handle);

/* ---- groups: made by submitting PERSEUS_ADD_GROUP / PERSEUS_REMOVE_GROUP on all ranks of the world --------------- */

/* Members in group order; returns how many, -1 for an unknown group; fills at most `capacity`. */
PERSEUS_EXPORT int perseus_group_ranks(const perseus_context* context, int group, int* ranks, int capacity);

/* 1, 2, … : the next number for the name of a request that its caller gave none. Counted per group as long as that
 * lives, in the world anew whenever all ranks have joined, so ranks agree about the numbers when they issue the same
 * unnamed requests there. -1 for a group this rank is not in. */
PERSEUS_EXPORT int64_t perseus_group_next_number(perseus_context* context, int group);

/* ---- speeds: what PERSEUS_CODEC_AUTO goes by, see docs/algorithms.md ------------------------------------------- */

#define PERSEUS_SPEEDS_CODECS 4

/* Measured when the first request of a group asks for PERSEUS_CODEC_AUTO; the largest values of all its ranks, so the
 * same on each of them. */
typedef struct perseus_speeds {
  size_t struct_size;
  int measurement;         /* its number; 0 = nothing was measured */
  int groups, shards;      /* sets of ranks that share memory, and ranks of each that exchange with the others */
  double latency_s;        /* of an exchange between them, */
  double seconds_per_byte; /* and of what a rank sends and receives at once */
  uint64_t sparse_from;    /* bytes: smaller tensors do not go as TOP_K */
  /* Of EXACT, FLOAT16, INT8, TOP_K: by byte of float32, seconds and bytes sent. */
  double encode_s[PERSEUS_SPEEDS_CODECS], decode_s[PERSEUS_SPEEDS_CODECS], wire[PERSEUS_SPEEDS_CODECS];
} perseus_speeds;
PERSEUS_EXPORT perseus_code perseus_group_speeds(perseus_context* context, int group, perseus_speeds* speeds);
/* Seconds that an allreduce of a float32 tensor of so many bytes takes between the groups; -1 for a codec that AUTO
 * does not choose, or when struct_size is wrong. A pure function, as is the next. */
PERSEUS_EXPORT double perseus_speeds_estimate(const perseus_speeds* speeds, int codec, uint64_t bytes);
/* The perseus_codec that AUTO takes for such a tensor; -1 when struct_size is wrong. */
PERSEUS_EXPORT int perseus_speeds_choose(const perseus_speeds* speeds, uint64_t bytes);

/* ---- timeline: a Chrome trace of every operation, see docs/timeline.md ------------------------------------------- */

/* Records into the file `path` from here on; a recording into another file ends, one into the same file goes on. All of
 * it has happened on return. Each rank decides for itself: rank 0 has the file as named, the others (trace.rank1.json)
 * write only with PERSEUS_TIMELINE_ALL_RANKS=1 and else do nothing here. mark_cycles: where negotiation rounds begin.
 * PERSEUS_INVALID_ARGUMENT when HOROVOD_TIMELINE is not set or the file cannot be written. */
PERSEUS_EXPORT perseus_code perseus_timeline_start(perseus_context* context, const char* path, int mark_cycles);
/* Ends the recording, if there is one: the file is complete on return, what happens later is not in it. */
PERSEUS_EXPORT perseus_code perseus_timeline_stop(perseus_context* context);

/* ---- comparing what ranks hold ---------------------------------------------------------------------------------- */

/* XXH64 with seed 0 of `bytes` bytes: the same number for the same bits on every rank. Not for secrets. */
PERSEUS_EXPORT uint64_t perseus_hash(const void* data, uint64_t bytes);

/* ---- kernels, for benchmarks ------------------------------------------------------------------------------------ */

PERSEUS_EXPORT const char* perseus_kernel_variant(void);

#ifdef __cplusplus
}
#endif
#endif  // PERSEUS_PERSEUS_H_

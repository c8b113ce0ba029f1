/* The C ABI of Perseus. Adapters include no other header of the core.
 *
 * Conventions
 * - Names: types are opaque, and functions are named perseus_<noun>_<verb>.
 * - Errors: a call that can fail returns a perseus_code; perseus_error_message() describes the calling thread's last
 *   failure. No exception crosses this boundary.
 * - Strings are NUL-terminated UTF-8. A returned string stays valid until the calling thread's next call, unless its
 *   function says otherwise.
 * - Structs: zero-initialise a struct and set its first field, `struct_size`, to its sizeof. New versions only add
 *   fields at the end, where 0 means the behaviour before the field existed. The library reads and writes no more of a
 *   struct than its size, and refuses a set field that it does not know with PERSEUS_INVALID_ARGUMENT. perseus_tensor
 *   and perseus_store_place have no size and never change.
 * - Threads: any number of threads may use a context, and several contexts (ranks) may live in one process.
 * - Forks: in a process that was forked after perseus_context_create, a context can be destroyed and asked for ranks
 *   and sizes. Every other call fails at once with PERSEUS_ABORTED, or returns what it returns for an unknown handle or
 *   group.
 * - Buffers belong to the caller and must stay valid and untouched until the handle is done. After that, with success
 *   or error, no thread and no peer uses them.
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
  PERSEUS_INVALID_ARGUMENT = 1, /* the request makes no sense and was not started */
  PERSEUS_MISMATCH = 2,         /* ranks disagree about this tensor; the job goes on */
  PERSEUS_IO = 3,               /* a link, file or segment failed */
  PERSEUS_TIMEOUT = 4,          /* a deadline passed */
  PERSEUS_ABORTED = 5,          /* the group failed or was shut down; initialise again to go on */
  PERSEUS_INTERNAL = 6,         /* a bug */
  PERSEUS_IN_PROGRESS = 7,      /* perseus_handle_wait: not done within the given time; not a failure */
  PERSEUS_NAN = 8               /* a rank's gradient has a NaN, which the settings make an error; the job goes on */
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

/* How elements are encoded between hosts; see docs/algorithms.md. A lossy codec keeps a residual under the request's
 * name and gradient_of, so use the same name in every step. */
typedef enum perseus_codec {
  PERSEUS_CODEC_SETTINGS = 0, /* gradients follow the settings; everything else is exact */
  PERSEUS_CODEC_EXACT = 1,
  PERSEUS_CODEC_FLOAT16 = 2,
  PERSEUS_CODEC_BFLOAT16 = 3,
  PERSEUS_CODEC_INT8 = 4,
  PERSEUS_CODEC_TOP_K = 5,
  PERSEUS_CODEC_ROTATE = 6,
  /* the fastest of EXACT, FLOAT16, INT8, INT4 and INT2 by perseus_group_speeds */
  PERSEUS_CODEC_AUTO = 7,
  /* nothing between hosts: each host has the sum or the average of its own ranks; a sum times size / ranks of the host.
   * The argument is N where the caller averages another N-th of the parameters in each step instead (ROTATE) */
  PERSEUS_CODEC_INSIDE = 8,
  /* of a matrix the product of two narrow ones; the argument is their rank (PowerSGD) */
  PERSEUS_CODEC_POWERSGD = 9,
  PERSEUS_CODEC_LOSSLESS = 10, /* float32 and bfloat16 in fewer bytes that give the same bits; others are exact */
  PERSEUS_CODEC_INT4 = 11,     /* as INT8, with integers of 4 bits */
  PERSEUS_CODEC_INT2 = 12      /* with integers of 2 bits: -1, 0 and 1 */
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
  /* This rank has no more data. Until all ranks of the group have joined, it contributes zeros to their allreduces;
   * their other collectives fail. The output's `size` is the rank that joined last. */
  PERSEUS_JOIN = 8,
  /* One tensor, of any dtype, from this rank to the rank `root`, and the receive of it there. Of the messages of one
   * rank that have the same `tag`, the one that was sent first goes to the receive that was posted first; a receive
   * with `root` PERSEUS_ANY_RANK takes what is announced to it first, whoever sends it. Its output's `size` is the
   * sender's rank. Both tensors must have the same size in bytes: otherwise both requests fail with PERSEUS_MISMATCH,
   * and the job goes on. A send is done once its receive is there and the tensor may be changed. */
  PERSEUS_SEND = 9,
  PERSEUS_RECEIVE = 10
} perseus_kind;
#define PERSEUS_ANY_RANK (-1)

PERSEUS_EXPORT const char* perseus_version(void);
/* Describes the calling thread's last failed call; "" before the first one. */
PERSEUS_EXPORT const char* perseus_error_message(void);

/* ---- configuration: the table that defines every variable ------------------------------------------------------ */

typedef struct perseus_config_variable {
  size_t struct_size;
  const char* name;          /* "PERSEUS_ALLREDUCE_STREAMS" */
  const char* aliases;       /* comma-separated, may be "" */
  const char* type;          /* "int", "float", "bool", "string", "choice" */
  const char* default_value; /* as text; "" = unset */
  const char* allowed;       /* "1..12", "0|1|2", "" = anything */
  const char* help;
} perseus_config_variable;

PERSEUS_EXPORT int perseus_config_count(void);
/* The strings live as long as the process. */
PERSEUS_EXPORT perseus_code perseus_config_describe(int index, perseus_config_variable* variable);
/* Checks all variables in the environment, as perseus_context_create does. */
PERSEUS_EXPORT perseus_code perseus_config_check(void);

/* ---- rendezvous ------------------------------------------------------------------------------------------------- */

typedef struct perseus_store_server perseus_store_server;

/* Starts a key-value server through which ranks find each other. Clients must prove that they know `secret`
 * (secret_size bytes, at least 1). An empty `host` means every interface, and port 0 any port. With next_free != 0 the
 * server takes the next free port if `port` is taken. */
PERSEUS_EXPORT perseus_code perseus_store_server_create(const char* host, int port, int next_free, const void* secret,
                                                        size_t secret_size, perseus_store_server** server);
PERSEUS_EXPORT int perseus_store_server_port(const perseus_store_server* server);
/* Ends the start of a world for all ranks that still wait for `rank` in it, which will not come: they get an error that
 * quotes `why`. job, epoch: see perseus_context_options. Does nothing to a world that has begun. */
PERSEUS_EXPORT perseus_code perseus_store_server_abandon(perseus_store_server* server, const char* job, unsigned epoch,
                                                         int rank, const char* why);
PERSEUS_EXPORT void perseus_store_server_destroy(perseus_store_server* server);

/* ---- context ---------------------------------------------------------------------------------------------------- */

typedef struct perseus_context perseus_context;

/* In whose terms messages speak. */
typedef enum perseus_api {
  PERSEUS_API_HOROVOD = 0,      /* init(), shutdown() */
  PERSEUS_API_PROCESS_GROUP = 1 /* torch.distributed: init_process_group(), destroy_process_group() */
} perseus_api;
typedef struct perseus_context_options {
  size_t struct_size;
  int rank, size;
  int local_rank, local_size; /* on this host; local_size 0 = Perseus derives both from host names */
  int cross_rank, cross_size; /* this host's index among the hosts with this local rank; 0 likewise */
  const char* store_host;     /* of a perseus_store_server; may be NULL if size is 1 */
  int store_port;
  const void* secret;
  size_t secret_size;
  const char* job; /* prefix of the store's keys; NULL = "world" */
  uint32_t epoch;  /* counts the worlds built in this job; equal on all ranks */
  /* NULL-terminated array of NAME=VALUE strings that override the environment; NULL = none. */
  const char* const* overrides;
  /* Not NULL: the ranks are threads of one process, find each other by this name, and need no store. */
  const char* memory_world;
  /* NULL, or called about every 100 ms while perseus_context_create blocks; non-zero makes that give up. */
  int (*interrupted)(void*);
  void* interrupted_arg;
  perseus_api api;
} perseus_context_options;

/* Blocks until all ranks are connected, or until the start timeout passes; the error names the missing ranks. Where the
 * store has stopped answering, it blocks some seconds longer. A rank that fails tells those that wait for it why. */
PERSEUS_EXPORT perseus_code perseus_context_create(const perseus_context_options* options, perseus_context** context);
/* The same for a process that knows nothing of its world. Rank, size and the way to the other ranks come from the
 * launcher: perseusrun, mpirun of Open MPI or MPICH, srun, or torchrun's variables. Without a launcher this is a world
 * of one rank. Perseus reads the environment and, under Open MPI, opens its libpmix.so.2; it needs nothing else. The
 * launcher is asked once for all worlds of the process, and rank 0's process runs the store until that process ends.
 * `job` is as above; the epoch counts this process's calls for that job. Under mpirun this process must not initialise
 * MPI afterwards, and under MPICH's mpirun not before either. Errors: PERSEUS_INVALID_ARGUMENT for a wrong or missing
 * variable, PERSEUS_TIMEOUT if ranks are missing after HOROVOD_START_TIMEOUT, PERSEUS_IO if the launcher does not
 * answer. */
PERSEUS_EXPORT perseus_code perseus_context_create_launched(const char* job, perseus_context** context);
typedef struct perseus_store_place {
  const char* host; /* "" and port 0 for a world of one rank, which has no store */
  int port;
  const void* secret;
  size_t secret_size;
} perseus_store_place;
/* Returns the address of that store, for processes that create their contexts with perseus_context_create. All ranks
 * must call it. `environment` is that of perseus_launched_identity_read; a process whose variables give it another
 * identity than in an earlier call has another store. Conditions and errors are those of
 * perseus_context_create_launched. The strings stay valid until the process ends. */
PERSEUS_EXPORT perseus_code perseus_launched_store(const char* const* environment, perseus_store_place* place);
/* Which rank of which world this process is. */
typedef struct perseus_launched_identity {
  size_t struct_size;
  int rank, size;
  int local_rank, local_size; /* local_size 0: the launcher does not say, and perseus_context_create finds out */
  int cross_rank, cross_size; /* likewise */
  const char* launcher;       /* "perseusrun", "torch", "openmpi", "mpich", "slurm" or "single"; never freed */
} perseus_launched_identity;
/* Reads the launcher's variables from `environment`, a NULL-terminated array of NAME=VALUE strings, or from this
 * process's environment if that is NULL. Each call reads them again. PERSEUS_INVALID_ARGUMENT for a variable that is
 * wrong or missing. */
PERSEUS_EXPORT perseus_code perseus_launched_identity_read(const char* const* environment,
                                                           perseus_launched_identity* identity);
/* Ends the world on all ranks. Operations that are under way on all ranks are finished first; pending ones fail
 * everywhere with PERSEUS_ABORTED "Horovod has been shut down…". May be called twice. */
PERSEUS_EXPORT void perseus_context_shutdown(perseus_context* context);
/* Ends the world on all ranks at once, because something is wrong: operations that are under way fail everywhere with
 * PERSEUS_ABORTED "rank 2 called abort(): <reason>" (of which others see at most 900 bytes). */
PERSEUS_EXPORT perseus_code perseus_context_abort(perseus_context* context, const char* reason);
/* Shuts the context down unless that was done, waits for its threads, and frees everything, handles included. */
PERSEUS_EXPORT void perseus_context_destroy(perseus_context* context);
/* An error is about to end this process. Only matters where Perseus has initialised MPI, whose end, when the process
 * exits, waits for all ranks: it waits no longer than 5 s then, so that a rank that hangs does not keep the others. */
PERSEUS_EXPORT void perseus_leave_after_failure(void);

/* Non-zero in a process that was forked after the context was created; the context has no threads there. */
PERSEUS_EXPORT int perseus_context_forked(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_rank(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_size(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_local_rank(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_local_size(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_cross_rank(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_cross_size(const perseus_context* context);
PERSEUS_EXPORT int perseus_context_is_homogeneous(const perseus_context* context);
/* The value that this context uses for a variable: a number, 0 or 1 for a flag, or the index of a choice; -1 for every
 * other type. */
PERSEUS_EXPORT int64_t perseus_context_setting(const perseus_context* context, const char* name);
/* From now on, this rank warns when it has waited for a living rank for `check_s` seconds, and ends the world after
 * `shutdown_s`; 0 = never. They take the place of HOROVOD_STALL_CHECK_TIME_SECONDS and
 * HOROVOD_STALL_SHUTDOWN_TIME_SECONDS. Ranks may differ: the first one to end
 * the world ends it for all, and the lowest rank that waits warns. Any thread. */
PERSEUS_EXPORT perseus_code perseus_context_set_stall_limits(perseus_context* context, int check_s, int shutdown_s);
/* PERSEUS_OK until the world ends, then why: PERSEUS_IO = a connection was lost, PERSEUS_TIMEOUT = a limit passed,
 * PERSEUS_ABORTED = a rank has shut it down, or another rank told of the failure that it saw; or another perseus_code.
 * `*reason` receives the text unless `reason` is NULL. */
PERSEUS_EXPORT int perseus_context_failed(const perseus_context* context, const char** reason);
/* The transport to `peer`: "none", "mem", "shm" or "tcp". */
PERSEUS_EXPORT const char* perseus_context_transport(const perseus_context* context, int peer);

typedef struct perseus_stats {
  size_t struct_size;
  uint64_t shm_bytes_sent, tcp_bytes_sent; /* including headers; mem counts as shm */
  uint64_t shm_bytes_received, tcp_bytes_received;
  uint64_t rounds;        /* finished negotiation rounds */
  uint64_t buckets;       /* executed buckets */
  uint64_t operations;    /* finished requests */
  uint64_t sleeps;        /* how often a thread slept while it waited for peers */
  uint64_t staging_bytes; /* memory in use beyond the caller's tensors */
  uint64_t messages;      /* sent by negotiation */
} perseus_stats;
PERSEUS_EXPORT perseus_code perseus_context_stats(const perseus_context* context, perseus_stats* stats);

/* ---- operations ------------------------------------------------------------------------------------------------- */

typedef int64_t perseus_handle; /* > 0 */

/* Where the tensors of a request are. */
typedef enum perseus_memory {
  PERSEUS_HOST = 0, /* in this process's memory */
  PERSEUS_CUDA = 1  /* on a GPU, through NVIDIA's driver, which is opened when a request first names it */
} perseus_memory;

typedef struct perseus_tensor {
  const void* input;
  /* May equal input. NULL for alltoall, see perseus_handle_output. RECEIVE: without input. Allgather: NULL, or, of one
   * tensor, memory for as many bytes of each rank as input has. Ranks' parts follow each other there, and input may be
   * this rank's part. Only if ranks turn out to have other sizes, the core owns the result all the same. */
  void* output;
  const int64_t* shape; /* copied by the call */
  int ndim;
  perseus_dtype dtype;
} perseus_tensor;

typedef struct perseus_request {
  size_t struct_size;
  perseus_kind kind;
  int group;        /* 0 = the world */
  const char* name; /* matches requests across ranks, in whatever order ranks submit them; SEND, RECEIVE: may be NULL */
  const perseus_tensor* tensors; /* several form a grouped operation: ready, executed and finished together */
  int tensor_count;
  perseus_reduce_op op;       /* allreduce, reducescatter */
  double prescale, postscale; /* 1.0 = no scaling; must be set, since 0 scales everything to 0 */
  int root;                   /* broadcast, SEND, RECEIVE: a GLOBAL rank */
  const int64_t* splits;      /* alltoall: rows of dimension 0 for every rank of the group; NULL = equal parts */
  int split_count;
  int priority;  /* requests that become ready together run in descending priority */
  int transient; /* non-zero: the name will not be used again, so it is not remembered */
  /* PERSEUS_ADD_GROUP: members; PERSEUS_REMOVE_GROUP: ranks[0] = group id. Allreduce and broadcast: in which order the
   * dimensions of the tensors lie in memory, if not by rows; it must be the same on all ranks. */
  const int* ranks;
  int rank_count;
  /* 0 = an ordinary operation. Otherwise this is a gradient of the optimizer (tape, store, …) to which the caller has
   * given this number: an allreduce of floating-point tensors, or an allgather of a sparse gradient's values, which
   * PERSEUS_ACCUMULATE_N_STEPS > 1 refuses. The settings for gradients apply; see perseus_handle_gradient. */
  uint64_t gradient_of;
  /* A perseus_codec, for sums and averages only. A lossy codec that sends less than 16 bits per element takes float16
   * and bfloat16 tensors as float32; a lossy codec that is named here also takes float64 tensors as float32. All other
   * tensors are sent unchanged. */
  int codec;
  double codec_argument; /* TOP_K: the fraction of elements; ROTATE, INSIDE: N; POWERSGD: the rank; 0 = as in the
                            settings */
  /* If not NULL, called once when the handle is done, by any thread that makes progress: perhaps the submitting one,
   * before perseus_request_submit returns. It must not block, so it must not wait for handles in progress, nor shut
   * down or destroy the context. It may read and release the handle, and submit requests. Never called for a request
   * that perseus_request_submit refuses. */
  void (*done)(void* done_arg, perseus_handle handle);
  void* done_arg;
  /* If not NULL, this rank cannot take part in what the others submit under this name, and this is the reason: the
   * request fails on all ranks with PERSEUS_MISMATCH and this text. Tensors and splits are ignored. */
  const char* refusal;
  int64_t tag; /* SEND, RECEIVE: not negative. They ignore all fields of which nothing else is said. */
  /* Gradients: the learning rate of the step that will apply this one, if the optimizer's step is proportional to its
   * rate and to the gradient; 0, or what is not finite = not known. What a codec has held back is multiplied by the
   * rate of the step that held it back, and divided by this. It is negative where this is all that it tells, because
   * steps are not proportional to gradients: then AUTO chooses neither INT4 nor INT2, as where any rank's is not
   * known. */
  double learning_rate;
  /* Gradients: the momentum m of an optimizer that keeps v = m v + gradient and steps by v times the learning rate, in
   * 0 to 1 exclusive and equal on all ranks; 0, or any other value = none, or not known. By it, top-k accumulates what
   * it holds back as the optimizer would have, and the results are such that v becomes what was exchanged (momentum
   * correction; see docs/algorithms.md). */
  double momentum;
  /* All tensors are in this memory; ranks may differ. PERSEUS_CUDA: they are read after what `stream` (a CUstream of
   * the GPU `device`; NULL = its legacy default stream) has to do when the request is submitted. Gradients, up to
   * 1 MiB of them together, may also wait for what it is given until the next of them is submitted. Nothing waits for
   * the GPU: a handle that is done says that the results are on their way, and perseus_handle_join orders a stream
   * behind them. Results that the core owns (perseus_handle_output) are in host memory. A stream that is captured into
   * a graph is refused. */
  int memory; /* a perseus_memory */
  int device; /* -1 = the one whose memory they are */
  void* stream;
} perseus_request;

/* Submits the request and returns at once. Does not copy tensors. */
PERSEUS_EXPORT perseus_code perseus_request_submit(perseus_context* context, const perseus_request* request,
                                                   perseus_handle* handle);
/* 1 if the handle is done, also with an error; 0 if it is in progress; -1 if it is unknown. Makes progress itself if no
 * other thread does. */
PERSEUS_EXPORT int perseus_handle_poll(perseus_context* context, perseus_handle handle);
/* Waits at most timeout_ms (-1 = for ever). Returns the operation's outcome, or PERSEUS_IN_PROGRESS after that time. */
PERSEUS_EXPORT perseus_code perseus_handle_wait(perseus_context* context, perseus_handle handle, int timeout_ms);

/* PERSEUS_CUDA: what `stream` is given from now on waits until the results of a handle that is done are written; after
 * a failure, too, since parts of results may be on their way. Before the handle is released. PERSEUS_INVALID_ARGUMENT
 * if the handle is unknown or in progress, or if the stream is captured into a graph. Does nothing for host memory. */
PERSEUS_EXPORT perseus_code perseus_handle_join(perseus_context* context, perseus_handle handle, void* stream);

/* What happened to a gradient whose handle is done without an error; the same on every rank of the group. Apply a step
 * only if all of its gradients are REDUCED. */
typedef enum perseus_gradient {
  PERSEUS_GRADIENT_REDUCED = 0, /* the output is reduced: over the sums if PERSEUS_ACCUMULATE_N_STEPS > 1 */
  PERSEUS_GRADIENT_HELD = 1,    /* added to a sum inside the context: nothing was sent or written */
  PERSEUS_GRADIENT_SKIPPED = 2  /* reduced, but a rank had a NaN and PERSEUS_ALLREDUCE_NANCHECK_ACTION is skip */
} perseus_gradient;
/* A perseus_gradient; -1 for a handle that is unknown or in progress. */
PERSEUS_EXPORT int perseus_handle_gradient(perseus_context* context, perseus_handle handle);
/* Drops all that is kept for this perseus_request.gradient_of: sums, residuals and momenta. Its steps count from the
 * start again, also those in which PowerSGD does not compress yet and top-k sends more. Call it on all ranks. */
PERSEUS_EXPORT void perseus_gradients_forget(perseus_context* context, uint64_t gradient_of);
/* Drops the sums alone: its next requests begin new ones. Call it on all ranks. */
PERSEUS_EXPORT void perseus_sums_forget(perseus_context* context, uint64_t gradient_of);

/* The optimizer has not applied the last results of this perseus_request.gradient_of: momentum correction begins anew
 * with its next requests, on all ranks, even if only some of them call this. See docs/algorithms.md. */
PERSEUS_EXPORT void perseus_momenta_forget(perseus_context* context, uint64_t gradient_of);

/* The residual that a lossy codec keeps on this rank for the requests of one name. Its first half has one number for
 * every element of the tensors, one tensor after the other: what is added to this rank's next gradient. The second half
 * has as many: what is added to the next results of which this rank is the owner. */
typedef struct perseus_residual {
  size_t struct_size;
  uint64_t gradient_of; /* as in the request, like `group` and `name` */
  int group;
  const char* name;
  float* data;     /* `count` numbers in the caller's memory; NULL = return the count only */
  size_t count;    /* two for every element; 0 = there is no residual */
  uint64_t layout; /* identifies the dtypes, and the division of chunks among the ranks that the residual belongs to */
  uint64_t shapes; /* identifies the tensors' shapes and orders in memory; 0 = not known: their number of elements
                      decides whether the residual is theirs */
  float factor;    /* what results were multiplied by, such as 1 / the number of ranks; if a later request has another
                      one, the first half is multiplied by this one over that one. 0 = not known: it stays as it is */
} perseus_residual;
/* Fills data, count, layout, shapes and factor. Returns PERSEUS_INVALID_ARGUMENT if `count` is wrong, and while a
 * request of that name is in progress. */
PERSEUS_EXPORT perseus_code perseus_residual_read(perseus_context* context, perseus_residual* residual);
/* Replaces the residual. The next request of that name continues with it. If the layout has changed, or the request's
 * codec keeps no residual, that request sends all of it instead. */
PERSEUS_EXPORT perseus_code perseus_residual_write(perseus_context* context, const perseus_residual* residual);
/* Flushes all residuals: the next request of every name with a residual sends all of it, as float32 and on all ranks,
 * even if only some of them call this. That request leaves no residual. */
PERSEUS_EXPORT perseus_code perseus_residuals_flush(perseus_context* context);

/* Allgather and alltoall: tensor `index` of the result, which the handle owns until it is released; `shape` has ndim
 * values. PERSEUS_ADD_GROUP: ndim is 0, and `size` is the new group's id. PERSEUS_JOIN: ndim is 0, and `size` is the
 * rank that joined last. PERSEUS_RECEIVE: ndim is 0, and `size` is the rank that sent it. */
typedef struct perseus_output {
  size_t struct_size;
  void* data;  /* NULL if the caller has given memory for the result, and it is there */
  size_t size; /* bytes */
  const int64_t* shape;
  int ndim;
  const int64_t* received_splits; /* alltoall: rows received from each rank */
  int received_split_count;
} perseus_output;
PERSEUS_EXPORT perseus_code perseus_handle_output(perseus_context* context, perseus_handle handle, int index,
                                                  perseus_output* output);
/* Transfers the buffer `data` of perseus_handle_output to the caller, who frees it with perseus_buffer_free. */
PERSEUS_EXPORT void* perseus_handle_take_output(perseus_context* context, perseus_handle handle, int index);
PERSEUS_EXPORT void perseus_buffer_free(void* data);
/* Frees a handle that is done. It is an error to release a handle in progress, or to release a handle twice. */
PERSEUS_EXPORT perseus_code perseus_handle_release(perseus_context* context, perseus_handle handle);

/* ---- groups: all ranks of the world submit PERSEUS_ADD_GROUP or PERSEUS_REMOVE_GROUP ---------------------------- */

/* Writes at most `capacity` members, in group order. Returns the number of members; -1 for an unknown group. */
PERSEUS_EXPORT int perseus_group_ranks(const perseus_context* context, int group, int* ranks, int capacity);

/* Returns 1, 2, …, from which an adapter makes the name of an unnamed request. Each group has its own counter, so ranks
 * agree on the numbers if they submit the same unnamed requests; a group's counter starts again once all of its ranks
 * have joined. -1 for a group that this rank is not in. */
PERSEUS_EXPORT int64_t perseus_group_next_number(perseus_context* context, int group);

/* ---- speeds: the base of PERSEUS_CODEC_AUTO's choices; see docs/algorithms.md ----------------------------------- */

#define PERSEUS_SPEEDS_CODECS 5

/* Measured when the first request of a group asks for PERSEUS_CODEC_AUTO. The values are the largest of all its ranks,
 * so every rank has the same. */
typedef struct perseus_speeds {
  size_t struct_size;
  int measurement;         /* its number; 0 = nothing was measured yet */
  int groups, shards;      /* sets of ranks that share memory; ranks of each set that exchange with other sets */
  double latency_s;        /* of an exchange between sets */
  double seconds_per_byte; /* that a rank sends and receives at the same time */
  /* for EXACT, FLOAT16, INT8, INT4 and INT2: seconds and sent bytes per byte of float32 */
  double encode_s[PERSEUS_SPEEDS_CODECS], decode_s[PERSEUS_SPEEDS_CODECS], wire[PERSEUS_SPEEDS_CODECS];
} perseus_speeds;
PERSEUS_EXPORT perseus_code perseus_group_speeds(perseus_context* context, int group, perseus_speeds* speeds);
/* Estimates the seconds that an allreduce of a float32 tensor of `bytes` bytes takes between the sets. -1 for a codec
 * that AUTO never chooses, or a wrong struct_size. A pure function, like the next one. */
PERSEUS_EXPORT double perseus_speeds_estimate(const perseus_speeds* speeds, int codec, uint64_t bytes);
/* The perseus_codec that AUTO chooses for such a tensor of an optimizer that steps in proportion to gradients; -1 for a
 * wrong struct_size. */
PERSEUS_EXPORT int perseus_speeds_choose(const perseus_speeds* speeds, uint64_t bytes);

/* ---- timeline: a Chrome trace of every operation; see docs/timeline.md ------------------------------------------- */

/* Starts recording into the file `path`. A recording into another file ends first; one into the same file continues.
 * The recording has begun when the call returns. Each rank calls this for itself: rank 0 writes `path`; the others
 * write trace.rank1.json and so on with PERSEUS_TIMELINE_ALL_RANKS=1, and otherwise do nothing. mark_cycles != 0 also
 * records where negotiation rounds begin. Returns PERSEUS_INVALID_ARGUMENT if HOROVOD_TIMELINE is not set or the file
 * cannot be written. */
PERSEUS_EXPORT perseus_code perseus_timeline_start(perseus_context* context, const char* path, int mark_cycles);
/* Ends the recording, if there is one. The file is complete when the call returns. */
PERSEUS_EXPORT perseus_code perseus_timeline_stop(perseus_context* context);

/* ---- GPUs -------------------------------------------------------------------------------------------------------- */

typedef struct perseus_cuda {
  size_t struct_size;
  int version; /* of CUDA that NVIDIA's driver serves: 12040 = 12.4 */
  int devices; /* GPUs that this process sees; -1 = not asked for */
} perseus_cuda;
/* Finds NVIDIA's driver, which requests with PERSEUS_CUDA need. With count_devices != 0 it is initialised, and
 * processes that this one forks later cannot use GPUs. PERSEUS_IO, and why, if there is none or if it cannot be used.
 */
PERSEUS_EXPORT perseus_code perseus_cuda_find(int count_devices, perseus_cuda* found);

typedef struct perseus_nccl {
  size_t struct_size;
  int version;      /* 22304 = 2.23.4 */
  const char* path; /* as it was opened; valid until the process ends */
} perseus_nccl;
/* Finds and opens NCCL, which sums tensors on GPUs inside a host. PERSEUS_IO, and why, if there is none or if it is too
 * old; then these sums are made in host memory. */
PERSEUS_EXPORT perseus_code perseus_nccl_find(perseus_nccl* found);

/* ---- a job that hangs ------------------------------------------------------------------------------------------ */

/* The signal at which this process logs what its worlds wait for, since its first context: PERSEUS_INSPECT_SIGNAL, or 0
 * if that is 0 or was handled by somebody else. With chain != 0, a handler that has been put in the place of ours is
 * called by ours from now on. */
PERSEUS_EXPORT int perseus_inspection_signal(int chain);

/* ---- comparing what ranks hold ---------------------------------------------------------------------------------- */

/* XXH64 of `bytes` bytes, with seed 0: the same bits give the same number on every rank. Not for secrets. */
PERSEUS_EXPORT uint64_t perseus_hash(const void* data, uint64_t bytes);
/* Two such numbers for every `block` bytes of `data`, of which the last may be fewer: that of the block, and that of
 * the block without its first four bytes. `hashes` has room for them. */
PERSEUS_EXPORT void perseus_hash_blocks(const void* data, uint64_t bytes, uint64_t block, uint64_t* hashes);

/* ---- kernels, for benchmarks ------------------------------------------------------------------------------------ */

PERSEUS_EXPORT const char* perseus_kernel_variant(void);

#ifdef __cplusplus
}
#endif
#endif  // PERSEUS_PERSEUS_H_

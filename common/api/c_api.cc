// The C ABI: the only place where exceptions become codes.
#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>

#include "api/context.h"
#include "api/launched.h"
#include "api/sized.h"
#include "base/clock.h"
#include "bootstrap/store.h"
#include "cuda/driver.h"
#include "kernels/hash.h"
#include "kernels/kernels.h"
#include "mpi/library.h"
#include "nccl/library.h"
#include "perseus/perseus.h"

struct perseus_context {
  std::unique_ptr<perseus::Context> context;
  std::string reason;
};
struct perseus_store_server {
  std::unique_ptr<perseus::StoreServer> server;
  std::string host, secret;
};

namespace {

using perseus::Engine;
using perseus::Error;
using perseus::ErrorKind;
using perseus::Given;
using perseus::HandleTable;

static_assert(static_cast<int>(perseus::DType::kBool) == PERSEUS_BOOL, "same numbers");
static_assert(static_cast<int>(perseus::ReduceOp::kProduct) == PERSEUS_PRODUCT, "same numbers");
static_assert(static_cast<int>(perseus::Kind::kReceive) == PERSEUS_RECEIVE, "same numbers");
static_assert(perseus::kKindCount == PERSEUS_RECEIVE + 1, "all of them");
static_assert(static_cast<int>(ErrorKind::kInternal) == PERSEUS_INTERNAL, "same numbers");
static_assert(static_cast<int>(ErrorKind::kNan) == PERSEUS_NAN, "same numbers");
static_assert(static_cast<int>(perseus::CodecWish::kLowRank) == PERSEUS_CODEC_POWERSGD, "same numbers");
static_assert(static_cast<int>(perseus::CodecWish::kLossless) == PERSEUS_CODEC_LOSSLESS, "same numbers");
static_assert(perseus::kAutoCodecs == PERSEUS_SPEEDS_CODECS, "same size");
static_assert(static_cast<int>(perseus::GradientOutcome::kSkipped) == PERSEUS_GRADIENT_SKIPPED, "same numbers");

// For the server of this process, on however busy a machine.
constexpr int64_t kStoreAnswer = 10 * perseus::kSecond;

thread_local std::string last_error;

perseus_code fail_with(ErrorKind kind, const char* text) {
  try {
    last_error = text;
  } catch (...) {
    last_error.clear();
  }
  return static_cast<perseus_code>(kind);
}

template <typename Body>
perseus_code guarded(Body body) {
  try {
    return body();
  } catch (const Error& error) {
    return fail_with(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    return fail_with(ErrorKind::kInternal, "[api] out of memory");
  } catch (const std::exception& error) {
    return fail_with(ErrorKind::kInternal, error.what());
  }
}

// Every entry point that works on a context goes through here or through answer(). In a forked child none of it may be
// touched: other threads of the parent may have held its locks.
template <typename Body>
perseus_code in_context(const perseus_context* context, Body body) {
  return guarded([&] {
    context->context->check_process();
    return body(*context->context);
  });
}

// The same for entry points that return no code; `otherwise` stands for every failure.
template <typename Result, typename Body>
Result answer(const perseus_context* context, Result otherwise, Body body) {
  Result result = otherwise;
  in_context(context, [&](perseus::Context& c) {
    result = body(c);
    return PERSEUS_OK;
  });
  return result;
}

[[noreturn]] void fail_unknown(perseus_handle handle) {
  perseus::fail(ErrorKind::kInvalidArgument,
                "[api] handle " + std::to_string(handle) + " was not created or has been cleared");
}

int public_codec(int auto_codec) { return perseus::wish_for(perseus::kAutoKinds[static_cast<size_t>(auto_codec)]); }

perseus::Speeds speeds_of(const perseus_speeds& from) {
  perseus::Speeds speeds;
  speeds.link = {from.measurement, from.latency_s, from.seconds_per_byte};
  speeds.groups = from.groups;
  speeds.shards = from.shards;
  for (size_t i = 0; i < speeds.codecs.size(); ++i)
    speeds.codecs[i] = {from.encode_s[i], from.decode_s[i], from.wire[i]};
  return speeds;
}

std::string text_of(const void* data, size_t size) {
  return data == nullptr ? std::string() : std::string(static_cast<const char*>(data), size);
}

}  // namespace

extern "C" {

const char* perseus_version(void) { return PERSEUS_VERSION; }
const char* perseus_error_message(void) { return last_error.c_str(); }

// ---- configuration ----

int perseus_config_count(void) { return static_cast<int>(perseus::Var::kCount); }

perseus_code perseus_config_describe(int index, perseus_config_variable* out) {
  return guarded([&] {
    if (index < 0 || index >= perseus_config_count())
      perseus::fail(ErrorKind::kInvalidArgument, "[config] no variable number " + std::to_string(index));
    const perseus::Variable& entry = perseus::variable(static_cast<perseus::Var>(index));
    perseus_config_variable found = {};
    found.name = entry.name;
    found.aliases = entry.aliases;
    found.type = perseus::var_type_name(entry.type);
    found.default_value = entry.default_value;
    found.allowed = entry.allowed;
    found.help = entry.help;
    perseus::give(found, out, "perseus_config_variable");
    return PERSEUS_OK;
  });
}

perseus_code perseus_config_check(void) {
  return guarded([] {
    perseus::Config();
    return PERSEUS_OK;
  });
}

// ---- rendezvous ----

perseus_code perseus_store_server_create(const char* host, int port, int next_free, const void* secret,
                                         size_t secret_size, perseus_store_server** out) {
  return guarded([&] {
    auto made = std::make_unique<perseus_store_server>();
    made->host = host == nullptr ? "" : host;
    made->secret = text_of(secret, secret_size);
    made->server = perseus::StoreServer::listen(made->host, port, next_free != 0, made->secret);
    *out = made.release();
    return PERSEUS_OK;
  });
}

int perseus_store_server_port(const perseus_store_server* server) { return server->server->port(); }
perseus_code perseus_store_server_abandon(perseus_store_server* server, const char* job, unsigned epoch, int rank,
                                          const char* why) {
  return guarded([&] {
    perseus::World world;
    world.job = job;
    world.epoch = epoch;
    world.rank = rank;
    const std::string host = server->host.empty() ? "127.0.0.1" : server->host;
    const int64_t deadline = perseus::now_ns() + kStoreAnswer;
    const auto store = perseus::connect_store(host, server->server->port(), server->secret, deadline);
    perseus::abandon_start(*store, world, why, deadline);
    return PERSEUS_OK;
  });
}

void perseus_store_server_destroy(perseus_store_server* server) { delete server; }

// ---- context ----

perseus_code perseus_context_create(const perseus_context_options* options, perseus_context** out) {
  return guarded([&] {
    const Given<perseus_context_options> given(options, "perseus_context_options");
    const perseus_context_options& o = *given;
    perseus::ContextOptions made;
    made.world.rank = o.rank;
    made.world.size = o.size;
    made.world.epoch = o.epoch;
    if (o.api != PERSEUS_API_HOROVOD && o.api != PERSEUS_API_PROCESS_GROUP)
      perseus::fail(perseus::ErrorKind::kInvalidArgument,
                    "[api] perseus_context_options.api: expected a perseus_api, got " + std::to_string(o.api));
    made.world.api = static_cast<perseus::Api>(o.api);
    made.world.secret = text_of(o.secret, o.secret_size);
    if (o.job != nullptr) made.world.job = o.job;
    made.local_rank = o.local_rank;
    made.local_size = o.local_size;
    made.cross_rank = o.cross_rank;
    made.cross_size = o.cross_size;
    if (o.store_host != nullptr) made.store_host = o.store_host;
    made.store_port = o.store_port;
    if (o.memory_world != nullptr) made.memory_world = o.memory_world;
    for (const char* const* text = o.overrides; text != nullptr && *text != nullptr; ++text)
      made.overrides.emplace_back(*text);
    if (o.interrupted != nullptr) made.interrupted = [&o] { return o.interrupted(o.interrupted_arg) != 0; };
    auto context = std::make_unique<perseus_context>();
    context->context = std::make_unique<perseus::Context>(made);
    *out = context.release();
    return PERSEUS_OK;
  });
}

perseus_code perseus_context_create_launched(const char* job, perseus_context** out) {
  return guarded([&] {
    auto context = std::make_unique<perseus_context>();
    context->context = perseus::create_launched(job == nullptr ? "world" : job);
    *out = context.release();
    return PERSEUS_OK;
  });
}

perseus_code perseus_launched_store(const char* const* environment, perseus_store_place* place) {
  return guarded([&] {
    const perseus::Rendezvous& rendezvous = perseus::launched_rendezvous(environment);
    *place = {rendezvous.host.c_str(), rendezvous.port, rendezvous.secret.data(), rendezvous.secret.size()};
    return PERSEUS_OK;
  });
}

perseus_code perseus_launched_identity_read(const char* const* environment, perseus_launched_identity* out) {
  return guarded([&] {
    const perseus::Identity identity = perseus::launched_identity(environment);
    perseus_launched_identity found = {};
    found.rank = identity.rank;
    found.size = identity.size;
    found.local_rank = identity.local_rank;
    found.local_size = identity.local_size;
    found.cross_rank = identity.cross_rank;
    found.cross_size = identity.cross_size;
    found.launcher = perseus::launcher_name(identity.launcher);
    perseus::give(found, out, "perseus_launched_identity");
    return PERSEUS_OK;
  });
}

void perseus_context_shutdown(perseus_context* context) {
  in_context(context, [](perseus::Context& c) {
    c.engine().shutdown();
    return PERSEUS_OK;
  });
}

perseus_code perseus_context_abort(perseus_context* context, const char* reason) {
  return in_context(context, [&](perseus::Context& c) {
    c.engine().abort_world(reason);
    return PERSEUS_OK;
  });
}

void perseus_context_destroy(perseus_context* context) {
  if (context == nullptr) return;
  guarded([&] {
    // In a forked child its threads do not exist and its descriptors are closed: forget it, destroying would hang.
    if (!context->context->in_creating_process()) context->context.release();
    delete context;
    return PERSEUS_OK;
  });
}

int perseus_context_forked(const perseus_context* context) { return context->context->in_creating_process() ? 0 : 1; }

// What never changes can be read in a forked child, too.
int perseus_context_rank(const perseus_context* context) { return context->context->rank(); }
int perseus_context_size(const perseus_context* context) { return context->context->size(); }
int perseus_context_local_rank(const perseus_context* context) { return context->context->local_rank(); }
int perseus_context_local_size(const perseus_context* context) { return context->context->local_size(); }
int perseus_context_cross_rank(const perseus_context* context) { return context->context->cross_rank(); }
int perseus_context_cross_size(const perseus_context* context) { return context->context->cross_size(); }
int perseus_context_is_homogeneous(const perseus_context* context) { return context->context->homogeneous() ? 1 : 0; }

int perseus_context_failed(const perseus_context* context, const char** reason) {
  static thread_local perseus::Status cause;
  const perseus_code code = in_context(context, [&](perseus::Context& c) {
    cause = c.engine().failure();
    return PERSEUS_OK;
  });
  if (reason != nullptr) *reason = (code == PERSEUS_OK ? cause.message : last_error).c_str();
  return code != PERSEUS_OK || cause.ok ? code : static_cast<int>(cause.kind);
}

int64_t perseus_context_setting(const perseus_context* context, const char* name) {
  return answer<int64_t>(context, -1, [&](perseus::Context& c) { return c.setting(name); });
}

const char* perseus_context_transport(const perseus_context* context, int peer) {
  return answer<const char*>(context, "none", [&](perseus::Context& c) {
    return peer < 0 || peer >= c.size() ? "none" : c.engine().transport_name(peer);
  });
}

perseus_code perseus_context_stats(const perseus_context* context, perseus_stats* out) {
  return in_context(context, [&](perseus::Context& c) {
    const perseus::EngineStats stats = c.engine().stats();
    perseus_stats found = {};
    found.shm_bytes_sent = stats.shm_sent;
    found.tcp_bytes_sent = stats.tcp_sent;
    found.shm_bytes_received = stats.shm_received;
    found.tcp_bytes_received = stats.tcp_received;
    found.rounds = stats.rounds;
    found.buckets = stats.buckets;
    found.operations = stats.operations;
    found.sleeps = stats.sleeps;
    found.staging_bytes = stats.staging_bytes;
    found.messages = stats.messages;
    perseus::give(found, out, "perseus_stats");
    return PERSEUS_OK;
  });
}

// ---- operations ----

static void refuse(const perseus_request& request, Engine::Submission* submission) {
  if (request.kind > PERSEUS_REDUCESCATTER)
    perseus::fail(ErrorKind::kInvalidArgument, "[api] only operations on tensors can be refused");
  submission->refusal = request.refusal;
  submission->tensor_count = submission->split_count = 0;
  submission->splits = nullptr;
  submission->gradient_of = 0;
}

perseus_code perseus_request_submit(perseus_context* context, const perseus_request* request, perseus_handle* handle) {
  return in_context(context, [&](perseus::Context& c) {
    const Given<perseus_request> given(request, "perseus_request");
    const perseus_request& r = *given;
    if (r.kind < PERSEUS_ALLREDUCE || r.kind > PERSEUS_RECEIVE || r.op < PERSEUS_AVERAGE || r.op > PERSEUS_PRODUCT)
      perseus::fail(ErrorKind::kInvalidArgument, "[api] unknown kind or reduction of a request");
    Engine::Submission::Tensor few[8];
    std::vector<Engine::Submission::Tensor> many;
    Engine::Submission::Tensor* tensors = few;
    if (r.tensor_count > 8) {
      many.resize(static_cast<size_t>(r.tensor_count));
      tensors = many.data();
    }
    for (int i = 0; i < r.tensor_count; ++i) {
      const perseus_tensor& t = r.tensors[i];
      tensors[i] = {t.input, t.output, t.shape, t.ndim, static_cast<perseus::DType>(t.dtype)};
    }
    Engine::Submission submission;
    submission.kind = static_cast<perseus::Kind>(r.kind);
    submission.group = r.group;
    submission.name = r.name;
    submission.op = static_cast<perseus::ReduceOp>(r.op);
    submission.prescale = r.prescale;
    submission.postscale = r.postscale;
    submission.root = r.root;
    submission.priority = r.priority;
    submission.transient = r.transient != 0;
    submission.tensors = tensors;
    submission.tensor_count = r.tensor_count;
    submission.splits = r.splits;
    submission.split_count = r.splits == nullptr ? 0 : r.split_count;
    submission.ranks = r.ranks;
    submission.rank_count = r.ranks == nullptr ? 0 : r.rank_count;
    submission.gradient_of = r.gradient_of;
    submission.learning_rate = r.learning_rate;
    submission.momentum = r.momentum;
    submission.codec = {r.codec, r.codec_argument};
    submission.done = {r.done, r.done_arg};
    submission.tag = r.tag;
    if (r.memory != PERSEUS_HOST && r.memory != PERSEUS_CUDA)
      perseus::fail(ErrorKind::kInvalidArgument,
                    "[api] perseus_request.memory: expected a perseus_memory, got " + std::to_string(r.memory));
    submission.on_cuda = r.memory == PERSEUS_CUDA;
    submission.device = r.device;
    submission.stream = r.stream;
    if (r.refusal != nullptr) refuse(r, &submission);
    *handle = c.engine().submit(submission);
    return PERSEUS_OK;
  });
}

int perseus_handle_poll(perseus_context* context, perseus_handle handle) {
  return answer(context, -1, [&](perseus::Context& c) {
    const HandleTable::Slot* slot = c.engine().poll(handle);
    return slot == nullptr ? -1 : HandleTable::is_over(*slot, handle) ? 1 : 0;
  });
}

perseus_code perseus_context_set_stall_limits(perseus_context* context, int check_s, int shutdown_s) {
  return in_context(context, [&](perseus::Context& c) {
    if (check_s < 0 || shutdown_s < 0)
      perseus::fail(perseus::ErrorKind::kInvalidArgument, "[api] stall limits: expected seconds, 0 for never");
    c.engine().set_stall_limits(check_s * perseus::kSecond, shutdown_s * perseus::kSecond);
    return PERSEUS_OK;
  });
}

perseus_code perseus_handle_wait(perseus_context* context, perseus_handle handle, int timeout_ms) {
  return in_context(context, [&](perseus::Context& c) {
    const int64_t deadline = timeout_ms < 0 ? INT64_MAX : perseus::now_ns() + timeout_ms * perseus::kMillisecond;
    const HandleTable::Slot* slot = c.engine().wait(handle, deadline);
    if (slot == nullptr) fail_unknown(handle);
    if (!HandleTable::is_over(*slot, handle)) return PERSEUS_IN_PROGRESS;
    const auto outcome = c.engine().handles().outcome(handle);
    if (!outcome) fail_unknown(handle);
    return outcome->ok ? PERSEUS_OK : fail_with(outcome->kind, outcome->message.c_str());
  });
}

perseus_code perseus_handle_join(perseus_context* context, perseus_handle handle, void* stream) {
  return in_context(context, [&](perseus::Context& c) {
    const HandleTable::Slot* slot = c.engine().handles().find(handle);
    if (slot == nullptr || !HandleTable::is_done(*slot)) fail_unknown(handle);
    if (slot->staging) slot->staging->join(stream);
    return PERSEUS_OK;
  });
}

int perseus_handle_gradient(perseus_context* context, perseus_handle handle) {
  return answer(context, -1, [&](perseus::Context& c) {
    const HandleTable::Slot* slot = c.engine().handles().find(handle);
    return slot == nullptr || !HandleTable::is_done(*slot) ? -1 : static_cast<int>(slot->gradient);
  });
}

void perseus_gradients_forget(perseus_context* context, uint64_t gradient_of) {
  in_context(context, [&](perseus::Context& c) {
    c.engine().forget_gradients(gradient_of);
    return PERSEUS_OK;
  });
}

void perseus_sums_forget(perseus_context* context, uint64_t gradient_of) {
  in_context(context, [&](perseus::Context& c) {
    c.engine().forget_sums(gradient_of);
    return PERSEUS_OK;
  });
}

void perseus_momenta_forget(perseus_context* context, uint64_t gradient_of) {
  in_context(context, [&](perseus::Context& c) {
    c.engine().forget_momenta(gradient_of);
    return PERSEUS_OK;
  });
}

perseus_code perseus_residual_read(perseus_context* context, perseus_residual* residual) {
  return in_context(context, [&](perseus::Context& c) {
    perseus_residual r = *Given<perseus_residual>(residual, "perseus_residual");
    perseus::Residuals::Place place{r.layout, r.shapes, r.factor};
    r.count = 2 * c.engine().read_residual(r.gradient_of, r.group, r.name, r.data, r.count, &place);
    r.layout = place.layout;
    r.shapes = place.shapes;
    r.factor = place.factor;
    perseus::give(r, residual, "perseus_residual");
    return PERSEUS_OK;
  });
}

perseus_code perseus_residual_write(perseus_context* context, const perseus_residual* residual) {
  return in_context(context, [&](perseus::Context& c) {
    const Given<perseus_residual> r(residual, "perseus_residual");
    c.engine().write_residual(r->gradient_of, r->group, r->name, r->data, r->count, {r->layout, r->shapes, r->factor});
    return PERSEUS_OK;
  });
}

perseus_code perseus_residuals_flush(perseus_context* context) {
  return in_context(context, [&](perseus::Context& c) {
    c.engine().flush_residuals();
    return PERSEUS_OK;
  });
}

perseus_code perseus_handle_output(perseus_context* context, perseus_handle handle, int index, perseus_output* out) {
  return in_context(context, [&](perseus::Context& c) {
    const HandleTable::Slot* slot = c.engine().handles().find(handle);
    if (slot == nullptr || !HandleTable::is_done(*slot) || index < 0 || index >= static_cast<int>(slot->outputs.size()))
      perseus::fail(ErrorKind::kInvalidArgument,
                    "[api] no such output: the handle is unknown, in progress or has none");
    const perseus::Output& output = slot->outputs[index];
    perseus_output found = {};
    found.data = output.data;
    found.size = output.bytes;
    found.shape = output.shape.data();
    found.ndim = static_cast<int>(output.shape.size());
    found.received_splits = output.received_splits.data();
    found.received_split_count = static_cast<int>(output.received_splits.size());
    perseus::give(found, out, "perseus_output");
    return PERSEUS_OK;
  });
}

void* perseus_handle_take_output(perseus_context* context, perseus_handle handle, int index) {
  return answer<void*>(context, nullptr,
                       [&](perseus::Context& c) { return c.engine().handles().take_output(handle, index); });
}

void perseus_buffer_free(void* data) { std::free(data); }

perseus_code perseus_handle_release(perseus_context* context, perseus_handle handle) {
  return in_context(context, [&](perseus::Context& c) {
    if (!c.engine().handles().release(handle))
      perseus::fail(ErrorKind::kInvalidArgument,
                    "[api] handle " + std::to_string(handle) + " is unknown or still in progress");
    return PERSEUS_OK;
  });
}

int64_t perseus_group_next_number(perseus_context* context, int group) {
  return answer<int64_t>(context, -1, [&](perseus::Context& c) { return c.engine().next_number(group); });
}

int perseus_group_ranks(const perseus_context* context, int group, int* ranks, int capacity) {
  return answer(context, -1, [&](perseus::Context& c) {
    const std::vector<int> members = c.engine().group_ranks(group);
    const int count = static_cast<int>(members.size());
    std::copy_n(members.begin(), std::clamp(capacity, 0, count), ranks);
    return count == 0 ? -1 : count;
  });
}

// ---- speeds ----

perseus_code perseus_group_speeds(perseus_context* context, int group, perseus_speeds* out) {
  return in_context(context, [&](perseus::Context& c) {
    const perseus::Speeds speeds = c.engine().speeds(group);
    perseus_speeds found = {};
    found.measurement = speeds.link.number;
    found.groups = speeds.groups;
    found.shards = speeds.shards;
    found.latency_s = speeds.link.latency_s;
    found.seconds_per_byte = speeds.link.seconds_per_byte;
    for (size_t i = 0; i < speeds.codecs.size(); ++i) {
      found.encode_s[i] = speeds.codecs[i].encode_s;
      found.decode_s[i] = speeds.codecs[i].decode_s;
      found.wire[i] = speeds.codecs[i].wire;
    }
    perseus::give(found, out, "perseus_speeds");
    return PERSEUS_OK;
  });
}

double perseus_speeds_estimate(const perseus_speeds* speeds, int codec, uint64_t bytes) {
  double seconds = -1;
  guarded([&] {
    const Given<perseus_speeds> given(speeds, "perseus_speeds");
    for (int i = 0; i < perseus::kAutoCodecs; ++i)
      if (public_codec(i) == codec) seconds = perseus::estimated_seconds(speeds_of(*given), i, bytes);
    return PERSEUS_OK;
  });
  return seconds;
}

int perseus_speeds_choose(const perseus_speeds* speeds, uint64_t bytes) {
  int codec = -1;
  guarded([&] {
    const Given<perseus_speeds> given(speeds, "perseus_speeds");
    codec = public_codec(perseus::choose_codec(speeds_of(*given), bytes));
    return PERSEUS_OK;
  });
  return codec;
}

// ---- timeline ----

perseus_code perseus_timeline_start(perseus_context* context, const char* path, int mark_cycles) {
  return in_context(context, [&](perseus::Context& c) {
    c.engine().start_timeline(path == nullptr ? "" : path, mark_cycles != 0);
    return PERSEUS_OK;
  });
}

perseus_code perseus_timeline_stop(perseus_context* context) {
  return in_context(context, [&](perseus::Context& c) {
    c.engine().stop_timeline();
    return PERSEUS_OK;
  });
}

perseus_code perseus_cuda_find(int count_devices, perseus_cuda* out) {
  return guarded([&] {
    const perseus::cuda::Driver& driver = perseus::cuda::Driver::get();
    perseus_cuda found = {};
    found.version = driver.version();
    found.devices = count_devices != 0 ? driver.devices() : -1;
    perseus::give(found, out, "perseus_cuda");
    return PERSEUS_OK;
  });
}

void perseus_leave_after_failure(void) { perseus::mpi::leave_after_failure(); }

int perseus_inspection_signal(int chain) { return perseus::Engine::inspection_signal(chain != 0); }

perseus_code perseus_nccl_find(perseus_nccl* out) {
  return guarded([&] {
    const perseus::Config config;
    const perseus::nccl::Library& library = perseus::nccl::Library::get(config.text(perseus::Var::kNcclLibrary));
    perseus_nccl found = {};
    found.version = library.version();
    found.path = library.path().c_str();
    perseus::give(found, out, "perseus_nccl");
    return PERSEUS_OK;
  });
}

uint64_t perseus_hash(const void* data, uint64_t bytes) { return perseus::kernels::hash(data, bytes); }

void perseus_hash_blocks(const void* data, uint64_t bytes, uint64_t block, uint64_t* hashes) {
  perseus::kernels::hash_blocks(data, bytes, block, hashes);
}

const char* perseus_kernel_variant(void) { return perseus::kernels::variant(); }

}  // extern "C"

// libperseus-caffe.so: broadcasts at the start, gradients while backward runs, one wait. See caffe.h for threads.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "caffe.h"
#include "difference.h"
#include "request.h"
#include "rotation.h"

struct perseus_exchange {
  perseus_context* context = nullptr;
  std::vector<perseus_handle> gradients, others;  // started and not waited for
  int64_t steps_begun = 0;
  double learning_rate = 0;  // of the present step; 0 = not known
  std::optional<perseus::Rotation> rotation;

  // Before the members, whose memory requests under way use.
  ~perseus_exchange() { perseus_context_destroy(context); }
};

namespace {

constexpr uint64_t kGradients = 1;  // a process trains one solver at a time

// The error that this library itself has found; "" = the last failure was the core's.
thread_local std::string own_message;

perseus_code submit(perseus_exchange* exchange, perseus::Request request, perseus_handle* handle) {
  own_message.clear();
  return perseus::submit(exchange->context, request, handle);
}

perseus_code wait_and_release(perseus_exchange* exchange, perseus_handle handle) {
  return perseus::wait_and_release(exchange->context, handle);
}

// Gathers every rank's `own`, of equal length everywhere, in the order of the ranks.
perseus_code gather(perseus_exchange* exchange, const std::vector<uint64_t>& own, std::vector<uint64_t>* all) {
  const perseus_context* context = exchange->context;
  all->assign(own.size() * static_cast<size_t>(perseus_context_size(context)), 0);
  const size_t place = own.size() * static_cast<size_t>(perseus_context_rank(context));
  std::copy(own.begin(), own.end(), all->begin() + static_cast<std::ptrdiff_t>(place));
  // A sum to which all other ranks add zeros.
  const std::string name = "compare/" + std::to_string(own.size());
  perseus_handle handle = 0;
  const perseus_code code = submit(exchange,
                                   {PERSEUS_ALLREDUCE,
                                    PERSEUS_SUM,
                                    name.c_str(),
                                    all->data(),
                                    all->data(),
                                    {static_cast<int64_t>(all->size())},
                                    PERSEUS_INT64},
                                   &handle);
  return code == PERSEUS_OK ? wait_and_release(exchange, handle) : code;
}

perseus_code fail_comparison(const std::string& why) {
  own_message = why;
  return PERSEUS_MISMATCH;
}

void fill_in(perseus_residual* residual) {
  own_message.clear();
  residual->struct_size = sizeof *residual;
  residual->gradient_of = kGradients;
  residual->group = 0;
}

}  // namespace

perseus_code perseus_exchange_create(perseus_exchange** exchange) {
  own_message.clear();
  auto made = std::make_unique<perseus_exchange>();
  const perseus_code code = perseus_context_create_launched("caffe", &made->context);
  if (code == PERSEUS_OK) *exchange = made.release();
  return code;
}

void perseus_exchange_destroy(perseus_exchange* exchange) { delete exchange; }

int perseus_exchange_rank(const perseus_exchange* exchange) { return perseus_context_rank(exchange->context); }

int perseus_exchange_size(const perseus_exchange* exchange) { return perseus_context_size(exchange->context); }

int perseus_exchange_local_rank(const perseus_exchange* exchange) {
  return perseus_context_local_rank(exchange->context);
}

void perseus_exchange_begin_training(perseus_exchange* exchange) {
  perseus_gradients_forget(exchange->context, kGradients);
  exchange->steps_begun = 0;
}

perseus_code perseus_exchange_broadcast(perseus_exchange* exchange, const char* name, void* data, int64_t count,
                                        perseus_dtype dtype) {
  perseus_handle handle = 0;
  const perseus_code code =
      submit(exchange, {PERSEUS_BROADCAST, PERSEUS_SUM, name, data, data, {count}, dtype}, &handle);
  return code == PERSEUS_OK ? wait_and_release(exchange, handle) : code;
}

void perseus_exchange_set_learning_rate(perseus_exchange* exchange, double learning_rate) {
  exchange->learning_rate = learning_rate;
}

perseus_code perseus_exchange_average(perseus_exchange* exchange, const char* name, void* data, const int* shape,
                                      int dims, perseus_dtype dtype) {
  perseus_handle handle = 0;
  perseus::Request request{PERSEUS_ALLREDUCE,     PERSEUS_AVERAGE, name,      data, data,
                           {shape, shape + dims}, dtype,           kGradients};
  if (exchange->rotation) {
    request.codec = PERSEUS_CODEC_INSIDE;
    request.codec_argument = exchange->rotation->parts();
  }
  request.learning_rate = exchange->learning_rate;
  const perseus_code code = submit(exchange, request, &handle);
  if (code == PERSEUS_OK) exchange->gradients.push_back(handle);
  return code;
}

perseus_code perseus_exchange_largest(perseus_exchange* exchange, const char* name, int32_t* data, int64_t count) {
  perseus_handle handle = 0;
  const perseus_code code =
      submit(exchange, {PERSEUS_ALLREDUCE, PERSEUS_MAX, name, data, data, {count}, PERSEUS_INT32}, &handle);
  if (code == PERSEUS_OK) exchange->others.push_back(handle);
  return code;
}

perseus_code perseus_exchange_finish(perseus_exchange* exchange, int* applies) {
  *applies = 1;
  // Later calls replace the message of the first failure, which is to be returned, so they come last.
  perseus_handle failed = 0;
  for (auto* handles : {&exchange->gradients, &exchange->others}) {
    for (const perseus_handle handle : *handles) {
      if (perseus_handle_wait(exchange->context, handle, -1) != PERSEUS_OK) {
        if (failed == 0) {
          failed = handle;
          continue;
        }
      } else if (handles == &exchange->gradients &&
                 perseus_handle_gradient(exchange->context, handle) != PERSEUS_GRADIENT_REDUCED) {
        *applies = 0;
      }
      perseus_handle_release(exchange->context, handle);
    }
    handles->clear();
  }
  return failed == 0 ? PERSEUS_OK : wait_and_release(exchange, failed);
}

perseus_code perseus_exchange_begin_rotation(perseus_exchange* exchange, int* rotates) {
  own_message.clear();
  *rotates = 0;
  if (exchange->rotation) exchange->rotation->drop();
  exchange->rotation.reset();
  const int64_t parts = perseus_context_setting(exchange->context, "PERSEUS_DOWNSAMPLE_N_ELEMENTS");
  if (parts <= 1 || perseus_exchange_size(exchange) == 1) return PERSEUS_OK;
  if (perseus_context_setting(exchange->context, "PERSEUS_PARAMETER_CHECK_N_STEPS") > 0) {
    own_message = "[rotate] parameters differ between ranks while each step averages 1/" + std::to_string(parts) +
                  " of them, so PERSEUS_PARAMETER_CHECK_N_STEPS cannot compare them: unset it, or "
                  "PERSEUS_DOWNSAMPLE_N_ELEMENTS.";
    return PERSEUS_INVALID_ARGUMENT;
  }
  bool all_inside = false;
  const perseus_code code = perseus::all_inside(exchange->context, &all_inside);
  if (code != PERSEUS_OK || all_inside) return code;
  exchange->rotation.emplace(exchange->context, static_cast<int>(parts));
  *rotates = 1;
  return PERSEUS_OK;
}

perseus_code perseus_exchange_take_turn(perseus_exchange* exchange, const perseus_values* parameters) {
  own_message.clear();
  return exchange->rotation ? exchange->rotation->take_turn(*parameters) : PERSEUS_OK;
}

perseus_code perseus_exchange_make_equal(perseus_exchange* exchange, const perseus_values* parameters) {
  own_message.clear();
  return exchange->rotation ? exchange->rotation->make_equal(*parameters) : PERSEUS_OK;
}

int perseus_exchange_compares(perseus_exchange* exchange) {
  const int64_t every = perseus_context_setting(exchange->context, "PERSEUS_PARAMETER_CHECK_N_STEPS");
  const int64_t taken = exchange->steps_begun++;
  return every > 0 && taken > 0 && taken % every == 0 && perseus_exchange_size(exchange) > 1 ? 1 : 0;
}

perseus_code perseus_exchange_compare(perseus_exchange* exchange, const perseus_parameter* parameters, int count) {
  std::vector<uint64_t> hashes;
  std::vector<std::string> names;
  for (const perseus_parameter* parameter = parameters; parameter < parameters + count; ++parameter) {
    hashes.push_back(perseus_hash(parameter->data, static_cast<uint64_t>(parameter->bytes)));
    names.emplace_back(parameter->name);
  }
  // One number from each rank shows whether all are equal; only if not, further numbers show what differs.
  std::vector<uint64_t> all;
  perseus_code code = gather(exchange, {perseus_hash(hashes.data(), hashes.size() * sizeof(uint64_t))}, &all);
  const auto equal = [&all] { return std::all_of(all.begin(), all.end(), [&](uint64_t n) { return n == all[0]; }); };
  if (code != PERSEUS_OK || equal()) return code;
  const int64_t steps = exchange->steps_begun - 1;
  code = gather(exchange, {hashes.size()}, &all);
  if (code != PERSEUS_OK) return code;
  if (!equal()) return fail_comparison(perseus::describe_counts(all, steps));
  code = gather(exchange, hashes, &all);
  return code == PERSEUS_OK ? fail_comparison(perseus::describe_difference(names, all, steps)) : code;
}

perseus_code perseus_exchange_residual_read(perseus_exchange* exchange, perseus_residual* residual) {
  fill_in(residual);
  return perseus_residual_read(exchange->context, residual);
}

perseus_code perseus_exchange_residual_write(perseus_exchange* exchange, perseus_residual* residual) {
  fill_in(residual);
  return perseus_residual_write(exchange->context, residual);
}

const char* perseus_exchange_error_message() {
  return own_message.empty() ? perseus_error_message() : own_message.c_str();
}

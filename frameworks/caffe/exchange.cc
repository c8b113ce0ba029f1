// libperseus-caffe.so: broadcasts at the start, gradients while backward runs, one wait. See caffe.h for threads.
#include <memory>
#include <string>
#include <vector>

#include "caffe.h"

struct perseus_exchange {
  perseus_context* context = nullptr;
  std::vector<perseus_handle> gradients, others;  // started and not waited for

  ~perseus_exchange() { perseus_context_destroy(context); }
};

namespace {

constexpr uint64_t kGradients = 1;  // a process trains one solver

perseus_code submit(perseus_exchange* exchange, perseus_kind kind, perseus_reduce_op op, uint64_t gradient_of,
                    const char* name, void* data, int64_t count, perseus_dtype dtype, perseus_handle* handle) {
  perseus_tensor tensor{data, data, &count, 1, dtype};
  perseus_request request{};
  request.struct_size = sizeof request;
  request.kind = kind;
  request.name = name;
  request.tensors = &tensor;
  request.tensor_count = 1;
  request.op = op;
  request.prescale = request.postscale = 1.0;
  request.gradient_of = gradient_of;
  request.transient = kind == PERSEUS_BROADCAST;
  return perseus_request_submit(exchange->context, &request, handle);
}

perseus_code wait_and_release(perseus_exchange* exchange, perseus_handle handle) {
  const perseus_code code = perseus_handle_wait(exchange->context, handle, -1);
  perseus_handle_release(exchange->context, handle);
  return code;
}

void fill_in(perseus_residual* residual) {
  residual->struct_size = sizeof *residual;
  residual->gradient_of = kGradients;
  residual->group = 0;
}

}  // namespace

perseus_code perseus_exchange_create(perseus_exchange** exchange) {
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

perseus_code perseus_exchange_broadcast(perseus_exchange* exchange, const char* name, void* data, int64_t count,
                                        perseus_dtype dtype) {
  perseus_handle handle = 0;
  const perseus_code code = submit(exchange, PERSEUS_BROADCAST, PERSEUS_SUM, 0, name, data, count, dtype, &handle);
  return code == PERSEUS_OK ? wait_and_release(exchange, handle) : code;
}

perseus_code perseus_exchange_average(perseus_exchange* exchange, const char* name, void* data, int64_t count,
                                      perseus_dtype dtype) {
  perseus_handle handle = 0;
  const perseus_code code =
      submit(exchange, PERSEUS_ALLREDUCE, PERSEUS_AVERAGE, kGradients, name, data, count, dtype, &handle);
  if (code == PERSEUS_OK) exchange->gradients.push_back(handle);
  return code;
}

perseus_code perseus_exchange_largest(perseus_exchange* exchange, const char* name, int32_t* data, int64_t count) {
  perseus_handle handle = 0;
  const perseus_code code =
      submit(exchange, PERSEUS_ALLREDUCE, PERSEUS_MAX, 0, name, data, count, PERSEUS_INT32, &handle);
  if (code == PERSEUS_OK) exchange->others.push_back(handle);
  return code;
}

perseus_code perseus_exchange_finish(perseus_exchange* exchange, int* applies) {
  *applies = 1;
  // The message of the first failure is what counts, and later calls replace it: those come last.
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

perseus_code perseus_exchange_residual_read(perseus_exchange* exchange, perseus_residual* residual) {
  fill_in(residual);
  return perseus_residual_read(exchange->context, residual);
}

perseus_code perseus_exchange_residual_write(perseus_exchange* exchange, perseus_residual* residual) {
  fill_in(residual);
  return perseus_residual_write(exchange->context, residual);
}

const char* perseus_exchange_error_message() { return perseus_error_message(); }

/* A rank without Python: joins the world that its launcher describes, as often as its argument says, and prints its
 * place, how it reaches the last rank, and a sum over all ranks. */
#include <stdio.h>
#include <stdlib.h>

#include "perseus/perseus.h"

static int failed(const char* what, perseus_code code) {
  fprintf(stderr, "%s %d: %s\n", what, (int)code, perseus_error_message());
  return 1;
}

static int add_up(perseus_context* context) {
  const int64_t shape[1] = {3};
  double values[3];
  perseus_tensor tensor = {values, values, shape, 1, PERSEUS_FLOAT64};
  perseus_request request = {sizeof request};
  perseus_handle handle;
  perseus_code code;
  double digit = 1;
  for (int i = 0; i < perseus_context_rank(context); ++i) digit *= 10;
  for (int i = 0; i < 3; ++i) values[i] = digit * (i + 1);
  request.kind = PERSEUS_ALLREDUCE;
  request.name = "sum";
  request.tensors = &tensor;
  request.tensor_count = 1;
  request.op = PERSEUS_SUM;
  request.prescale = request.postscale = 1.0;
  code = perseus_request_submit(context, &request, &handle);
  if (code == PERSEUS_OK) code = perseus_handle_wait(context, handle, -1);
  if (code != PERSEUS_OK) return failed("allreduce", code);
  printf("%d %d %d %d %d %d %s %.0f %.0f %.0f\n", perseus_context_rank(context), perseus_context_size(context),
         perseus_context_local_rank(context), perseus_context_local_size(context), perseus_context_cross_rank(context),
         perseus_context_cross_size(context), perseus_context_transport(context, perseus_context_size(context) - 1),
         values[0], values[1], values[2]);
  fflush(stdout);
  return 0;
}

int main(int argc, char** argv) {
  const int worlds = argc > 1 ? atoi(argv[1]) : 1;
  for (int i = 0; i < worlds; ++i) {
    perseus_context* context = NULL;
    const perseus_code code = perseus_context_create_launched("launched", &context);
    if (code != PERSEUS_OK) return failed("create", code);
    if (add_up(context) != 0) return 1;
    perseus_context_destroy(context);
  }
  return 0;
}

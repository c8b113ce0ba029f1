#include "world.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>

namespace {

// A report ends the process, and with it what a test has captured of standard error: reports pass it by.
[[maybe_unused]] const bool reports_pass_by = [] {
  __sanitizer_set_report_fd(reinterpret_cast<void*>(static_cast<intptr_t>(fcntl(2, F_DUPFD_CLOEXEC, 3))));
  return true;
}();

}  // namespace
#endif

namespace perseus_test {

std::string unique_name() {
  static std::atomic<int> counter{0};
  return "test-" + std::to_string(counter.fetch_add(1));
}

perseus_code create_context(const Medium& medium, const std::string& name, int rank, int size, uint32_t epoch,
                            std::vector<std::string> settings, perseus_context** context) {
  settings.push_back(std::string("PERSEUS_TRANSPORT=") + medium.transport);
  // In every other world, for what goes over TCP.
  settings.emplace_back(size % 2 == 0 ? "PERSEUS_CHECKSUM=1" : "PERSEUS_CHECKSUM=0");
  std::vector<const char*> overrides;
  for (const std::string& text : settings) overrides.push_back(text.c_str());
  overrides.push_back(nullptr);
  perseus_context_options o{};
  o.struct_size = sizeof o;
  o.rank = rank;
  o.size = size;
  o.epoch = epoch;
  o.secret = "secret of a test";
  o.secret_size = 16;
  o.memory_world = name.c_str();
  o.overrides = overrides.data();
  return perseus_context_create(&o, context);
}

void run_world(const Medium& medium, int size, const std::function<void(int, perseus_context*)>& body,
               const WorldOptions& options) {
  const std::string name = unique_name();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      perseus_context* context = nullptr;
      const perseus_code code = create_context(medium, name, rank, size, 0, options.overrides, &context);
      if (code != PERSEUS_OK) {
        if (options.on_create_error) options.on_create_error(rank, code, perseus_error_message());
        else ADD_FAILURE() << "rank " << rank << ": " << perseus_error_message();
        return;
      }
      body(rank, context);
      perseus_context_destroy(context);
    });
  for (std::thread& thread : threads) thread.join();
}

bool comes_true(const std::function<bool()>& fact, int seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (!fact()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

perseus_stats stats_of(perseus_context* context) {
  perseus_stats stats{};
  stats.struct_size = sizeof stats;
  EXPECT_EQ(perseus_context_stats(context, &stats), PERSEUS_OK);
  return stats;
}

perseus_request request_of(perseus_kind kind, const char* name, const perseus_tensor* tensors, int count) {
  perseus_request r{};
  r.struct_size = sizeof r;
  r.kind = kind;
  r.name = name;
  r.tensors = tensors;
  r.tensor_count = count;
  r.op = PERSEUS_SUM;
  r.prescale = r.postscale = 1.0;
  return r;
}

Outcome submit(perseus_context* context, const perseus_request& request, perseus_handle* handle) {
  const perseus_code code = perseus_request_submit(context, &request, handle);
  return {code, code == PERSEUS_OK ? "" : perseus_error_message()};
}

Outcome wait(perseus_context* context, perseus_handle handle, int timeout_ms) {
  const perseus_code code = perseus_handle_wait(context, handle, timeout_ms);
  return {code, code == PERSEUS_OK ? "" : perseus_error_message()};
}

Outcome run(perseus_context* context, const perseus_request& request) {
  perseus_handle handle = 0;
  Outcome outcome = submit(context, request, &handle);
  if (outcome.code != PERSEUS_OK) return outcome;
  outcome = wait(context, handle);
  if (outcome.code != PERSEUS_IN_PROGRESS) perseus_handle_release(context, handle);
  return outcome;
}

uint64_t messages_at_rest(perseus_context* context, Barrier* barrier) {
  barrier->wait();
  const uint64_t messages = stats_of(context).messages;
  barrier->wait();
  return messages;
}

}  // namespace perseus_test

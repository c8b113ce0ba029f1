// See rotation.h.
#include "rotation.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "request.h"

namespace perseus {
namespace {

size_t size_of(perseus_dtype dtype) { return dtype == PERSEUS_FLOAT64 ? sizeof(double) : sizeof(float); }

// Calls visit(begin of the rows in memory, their bytes) for the elements of every tensor that belong to a part.
template <typename Visit>
void for_rows(const perseus_values& parameters, int part, int parts, Visit visit) {
  const size_t size = size_of(parameters.dtype);
  for (int i = 0; i < parameters.tensor_count; ++i) {
    const int64_t count = parameters.counts[i];
    const int64_t begin = count * part / parts, end = count * (part + 1) / parts;
    if (begin == end) continue;
    visit(static_cast<std::byte*>(parameters.data[i]) + static_cast<size_t>(begin) * size,
          static_cast<size_t>(end - begin) * size);
  }
}

template <typename T>
void add_difference(std::byte* rows, size_t bytes, const std::byte* average, const std::byte* sent) {
  T* const values = reinterpret_cast<T*>(rows);
  const T* const to = reinterpret_cast<const T*>(average);
  const T* const from = reinterpret_cast<const T*>(sent);
  for (size_t i = 0; i < bytes / sizeof(T); ++i) values[i] += to[i] - from[i];
}

}  // namespace

perseus_code Rotation::take_turn(const perseus_values& parameters) {
  // Another part than the one under way, so the new one need not wait for that.
  Exchange sent;
  const perseus_code code = send(parameters, turn_, &sent);
  if (code != PERSEUS_OK) return code;
  std::swap(under_way_, sent);
  turn_ = (turn_ + 1) % parts_;
  return correct(parameters, &sent);
}

perseus_code Rotation::make_equal(const perseus_values& parameters) {
  perseus_code code = correct(parameters, &under_way_);
  for (int part = 0; part < parts_ && code == PERSEUS_OK; ++part) {
    Exchange exchange;
    code = send(parameters, part, &exchange);
    if (code == PERSEUS_OK) code = receive(&exchange);
    if (code != PERSEUS_OK) break;
    const std::byte* average = exchange.average.data();
    for_rows(parameters, part, parts_, [&](std::byte* rows, size_t bytes) {
      std::memcpy(rows, average, bytes);
      average += bytes;
    });
  }
  return code;
}

void Rotation::drop() {
  receive(&under_way_);
  under_way_ = Exchange();
}

perseus_code Rotation::send(const perseus_values& parameters, int part, Exchange* exchange) const {
  exchange->part = part;
  for_rows(parameters, part, parts_, [&](const std::byte* rows, size_t bytes) {
    exchange->sent.insert(exchange->sent.end(), rows, rows + bytes);
  });
  if (exchange->sent.empty()) return PERSEUS_OK;
  exchange->average.resize(exchange->sent.size());
  const std::string name = "rotate." + std::to_string(part);
  const Request request{PERSEUS_ALLREDUCE,
                        PERSEUS_AVERAGE,
                        name.c_str(),
                        exchange->sent.data(),
                        exchange->average.data(),
                        {static_cast<int64_t>(exchange->sent.size() / size_of(parameters.dtype))},
                        parameters.dtype};
  return submit(context_, request, &exchange->handle);
}

perseus_code Rotation::receive(Exchange* exchange) const {
  return exchange->handle == 0 ? PERSEUS_OK : wait_and_release(context_, std::exchange(exchange->handle, 0));
}

perseus_code Rotation::correct(const perseus_values& parameters, Exchange* exchange) const {
  const perseus_code code = receive(exchange);
  if (code == PERSEUS_OK && !exchange->sent.empty()) {
    const auto add = parameters.dtype == PERSEUS_FLOAT64 ? add_difference<double> : add_difference<float>;
    size_t place = 0;
    for_rows(parameters, exchange->part, parts_, [&](std::byte* rows, size_t bytes) {
      add(rows, bytes, exchange->average.data() + place, exchange->sent.data() + place);
      place += bytes;
    });
  }
  *exchange = Exchange();
  return code;
}

perseus_code all_inside(perseus_context* context, bool* all) {
  // Every rank adds a 1 at its place; those of other hosts do not arrive.
  std::vector<float> places(static_cast<size_t>(perseus_context_size(context)), 0.0F);
  places[static_cast<size_t>(perseus_context_rank(context))] = 1.0F;
  Request request{PERSEUS_ALLREDUCE, PERSEUS_SUM,   "rotate.inside",
                  places.data(),     places.data(), {static_cast<int64_t>(places.size())},
                  PERSEUS_FLOAT32};
  request.codec = PERSEUS_CODEC_INSIDE;
  perseus_handle handle = 0;
  perseus_code code = submit(context, request, &handle);
  if (code == PERSEUS_OK) code = wait_and_release(context, handle);
  *all = std::count(places.begin(), places.end(), 0.0F) == 0;
  return code;
}

}  // namespace perseus

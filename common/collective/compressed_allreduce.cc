// Encode, add in rank order, encode again.
#include "collective/compressed_allreduce.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/codec_kernels.h"

namespace perseus {
namespace {

void scale(float factor, const float* from, float* to, size_t count) {
  kernels::ReduceSpec spec;
  spec.postscale = factor;
  const void* source = from;
  kernels::reduce(spec, to, nullptr, &source, 1, count, false);
}

// Here, and not in every codec: the chunk is in the cache for what follows.
void carry(float factor, float* residual, size_t count) {
  if (residual != nullptr && factor != 1.0F) scale(factor, residual, residual, count);
}

size_t size_of(const Byte* encoded) {
  uint32_t size;
  std::memcpy(&size, encoded, sizeof size);
  return size;
}

// See Momenta. Returns the largest magnitude.
uint32_t accumulate(const CompressedChunk& chunk, const float* x) {
  return kernels::add_to_residual(x, chunk.momenta.momentum, chunk.momenta.velocity, chunk.count);
}

// An element that is not finite is sent once, and forgotten.
void forget_not_finite(float* x, size_t count) {
  std::replace_if(x, x + count, [](float value) { return !std::isfinite(value); }, 0.0F);
}

// Finds `chunks` chunks in the bytes that a peer has sent: found[i * stride] is the i-th.
void find_chunks(const Byte* at, size_t bytes, size_t chunks, size_t stride, const Byte** found) {
  const Byte* const end = at + bytes;
  for (size_t i = 0; i < chunks; ++i) {
    const auto left = static_cast<size_t>(end - at);
    if (left < sizeof(uint32_t) || size_of(at) < sizeof(uint32_t) || size_of(at) > left)
      fail(ErrorKind::kIo, "[collective] encoded gradients from a peer end too early");
    found[i * stride] = at;
    at += size_of(at);
  }
}

}  // namespace

CompressedAllreduce::CompressedAllreduce(int members, int me)
    : members_(members), me_(me), chunks_(static_cast<size_t>(members)) {
  plan_.reduction.dtype = DType::kUInt8;
}

void CompressedAllreduce::start(const WireFormat& format, float prescale, float factor, bool last) {
  format_ = &format;
  prescale_ = prescale;
  factor_ = factor;
  last_ = last;
  sums_only_ = false;
  results_ = nullptr;
  stage_ = Stage::kEncode;
  codec_ns_ = 0;
  for (std::vector<CompressedChunk>& chunks : chunks_) chunks.clear();
  order_.clear();
  slices_.clear();
}

void CompressedAllreduce::use(CompressedBuffers* buffers, ThreadPool* threads) {
  buffers_ = buffers;
  threads_ = threads;
  parts_.resize(static_cast<size_t>(threads->threads()));
  buffers_->scratch.resize(2 * kWireChunk * static_cast<size_t>(threads->threads()));
}

const ExchangePlan* CompressedAllreduce::next() {
  const int64_t begun = now_ns();
  const Stage stage = stage_;
  switch (stage) {
    case Stage::kEncode:
      if (format_->selects()) select();
      encode();
      stage_ = Stage::kReduce;
      break;
    case Stage::kReduce:
      reduce();
      stage_ = Stage::kFinish;
      break;
    case Stage::kFinish:
      finish();
      break;
  }
  codec_ns_ += now_ns() - begun;
  const bool pauses = stage == Stage::kReduce && sums_only_;
  return stage == Stage::kFinish || pauses ? nullptr : &plan_;
}

const ExchangePlan* CompressedAllreduce::spread(const WireFormat& format, const std::vector<Piece>& results) {
  format_ = &format;
  plan_.clear();
  plan_.pieces = results;
  send_results(total_bytes(results));
  return &plan_;
}

CompressedAllreduce::Load CompressedAllreduce::load_of(int owner) const {
  Load load;
  for (const CompressedChunk& chunk : chunks_[static_cast<size_t>(owner)]) load.add({1, chunk.count});
  return load;
}

// How many chunks make a task, where so much is to be shared.
size_t CompressedAllreduce::chunks_in_task(const Load& load) const {
  const size_t tasks = threads_->tasks_for(load.floats);
  return std::max((load.chunks + tasks - 1) / tasks, size_t{1});
}

void CompressedAllreduce::cut_into_tasks(int owner, size_t together) {
  const size_t chunks = chunks_[static_cast<size_t>(owner)].size();
  for (size_t begin = 0; begin < chunks; begin += together) {
    Task task;
    task.owner = owner;
    task.begin = begin;
    task.end = std::min(begin + together, chunks);
    tasks_.push_back(task);
  }
}

// Grows `buffer` so that all encodings have room, of tasks on the own chunks or of all others.
void CompressedAllreduce::give_room(bool own, std::vector<Byte>* buffer) {
  size_t total = 0;
  for (Task& task : tasks_) {
    if ((task.owner == me_) != own) continue;
    const CompressedChunk* const chunks = chunks_[static_cast<size_t>(task.owner)].data();
    task.found = total;  // until the buffer stays where it is
    for (size_t i = task.begin; i < task.end; ++i) total += format_->most_bytes(chunks[i].count);
  }
  if (buffer->size() < total) buffer->resize(total);
  for (Task& task : tasks_)
    if ((task.owner == me_) == own) task.room = buffer->data() + task.found;
}

// Calls body(thread, task) for all tasks, on several threads if so much is to be shared.
template <class Body>
void CompressedAllreduce::in_parallel(const Load& load, const Body& body) {
  ThreadPool& threads = threads_->tasks_for(load.floats) > 1 ? *threads_ : ThreadPool::none();
  threads.parallel_for(tasks_.size(), [&](size_t task, size_t thread) { body(thread, &tasks_[task]); });
}

void CompressedAllreduce::select() {
  buffers_->selected.clear();
  slices_.push_back(order_.size());
  for (size_t i = 0; i + 1 < slices_.size(); ++i) {
    const Place *const begin = order_.data() + slices_[i], *const end = order_.data() + slices_[i + 1];
    if (begin == end) continue;
    // Otherwise there is nothing to prepare; all chunks of a slice are alike in that.
    const CompressedChunk& one = chunk_at(*begin);
    if (one.whole) continue;
    size_t floats = 0;
    if (one.slot == nullptr && (prescale_ != 1.0F || one.carry != 1.0F || one.momenta.velocity != nullptr))
      for (const Place* place = begin; place != end; ++place) floats += chunk_at(*place).count;
    threads_->for_parts(floats == 0 ? 0 : static_cast<size_t>(end - begin), floats,
                        [=](size_t from, size_t to, size_t) {
                          for (const Place* place = begin + from; place != begin + to; ++place)
                            prepare_to_select(&chunk_at(*place));
                        });
    slice_.clear();
    for (const Place* place = begin; place != end; ++place) {
      const CompressedChunk& chunk = chunk_at(*place);
      slice_.push_back({chunk.in, chunk.residual, chunk.momenta.masked(), chunk.count, chunk.slot});
    }
    format_->select(slice_.data(), slice_.size(), chunk_at(*begin).step, threads_, &buffers_->selected);
    for (size_t c = 0; c < slice_.size(); ++c) chunk_at(begin[c]).selection = slice_[c];
  }
}

void CompressedAllreduce::prepare_to_select(CompressedChunk* chunk) const {
  // Its place for the result serves: a selected chunk is looked at more than once.
  if (prescale_ != 1.0F) {
    scale(prescale_, chunk->in, chunk->out, chunk->count);
    chunk->in = chunk->out;
  }
  if (chunk->momenta.velocity != nullptr) {
    accumulate(*chunk, chunk->in);
    chunk->in = chunk->momenta.velocity;
  }
  carry(chunk->carry, chunk->residual, chunk->count);
}

void CompressedAllreduce::encode() {
  Load all;
  for (int owner = 0; owner < members_; ++owner) all.add(load_of(owner));
  tasks_.clear();
  for (int owner = 0; owner < members_; ++owner) cut_into_tasks(owner, chunks_in_task(all));
  give_room(true, &buffers_->own);
  give_room(false, &buffers_->sent);
  encoded_.resize(chunks_[static_cast<size_t>(me_)].size() * static_cast<size_t>(members_));
  in_parallel(all, [this](size_t thread, Task* task) { encode(thread, task); });
  plan_.clear();
  plan_.collective = Collective::kAlltoall;
  plan_.send_bytes.resize(static_cast<size_t>(members_));
  for (const Task& task : tasks_) {
    if (task.owner == me_) continue;
    plan_.pieces.push_back(Piece{task.room, nullptr, task.bytes});
    plan_.send_bytes[static_cast<size_t>(task.owner)] += task.bytes;
  }
  plan_.send_rows.assign(plan_.send_bytes.begin(), plan_.send_bytes.end());
}

void CompressedAllreduce::encode(size_t thread, Task* task) {
  const std::vector<CompressedChunk>& chunks = chunks_[static_cast<size_t>(task->owner)];
  Byte* at = task->room;
  for (size_t i = task->begin; i < task->end; ++i) {
    const CompressedChunk& chunk = chunks[i];
    if (task->owner == me_) encoded_[i * static_cast<size_t>(members_) + static_cast<size_t>(me_)] = at;
    if (format_->selects() && !chunk.whole) {
      at += format_->encode_selected(chunk.selection, buffers_->selected.data(), at);
      if (chunk.momenta.velocity != nullptr && chunk.selection.selected == ChunkSelection::kAll)
        forget_not_finite(chunk.momenta.velocity, chunk.count);
      continue;
    }
    if (chunk.slot != nullptr) {
      at += format_->take_over(chunk.slot, chunk.residual, chunk.count, at);
      continue;
    }
    const float* x = chunk.in;
    if (prescale_ != 1.0F) {
      scale(prescale_, x, scratch(thread), chunk.count);
      x = scratch(thread);
    }
    if (chunk.whole) {
      at += format_->encode_whole(x, chunk.count, at);
      continue;
    }
    uint32_t largest = 0;
    if (chunk.momenta.velocity != nullptr) {
      largest = accumulate(chunk, x);
      x = chunk.momenta.velocity;
    }
    carry(chunk.carry, chunk.residual, chunk.count);
    at += format_->encode(x, chunk.residual, chunk.count, chunk.step, at);
    if (float* const masked = chunk.momenta.masked()) std::memset(masked, 0, chunk.count * sizeof(float));
    else if (largest >= kernels::kNotFinite) forget_not_finite(chunk.momenta.velocity, chunk.count);
  }
  task->bytes = static_cast<size_t>(at - task->room);
}

void CompressedAllreduce::reduce() {
  const size_t own = chunks_[static_cast<size_t>(me_)].size();
  const Byte* from = received().data();
  for (int member = 0; member < members_; ++member) {
    const size_t bytes = received_bytes_[static_cast<size_t>(member)];
    if (member != me_) find_chunks(from, bytes, own, static_cast<size_t>(members_), encoded_.data() + member);
    from += bytes;
  }
  tasks_.clear();
  const Load load = load_of(me_);
  cut_into_tasks(me_, chunks_in_task(load));
  if (!sums_only_) give_room(true, &buffers_->sent);
  in_parallel(load, [this](size_t thread, Task* task) { reduce(thread, task); });
  if (sums_only_) return;
  plan_.clear();
  size_t bytes = 0;
  for (const Task& task : tasks_) {
    plan_.pieces.push_back(Piece{task.room, nullptr, task.bytes});
    bytes += task.bytes;
  }
  send_results(bytes);
}

void CompressedAllreduce::reduce(size_t thread, Task* task) {
  const auto members = static_cast<size_t>(members_);
  std::vector<const Byte*>& parts = parts_[thread];
  Byte* at = task->room;
  for (size_t i = task->begin; i < task->end; ++i) {
    const CompressedChunk& chunk = chunks_[static_cast<size_t>(me_)][i];
    float* const sum = sums_only_ ? chunk.out : scratch(thread) + kWireChunk;
    parts.assign(encoded_.begin() + static_cast<ptrdiff_t>(i * members),
                 encoded_.begin() + static_cast<ptrdiff_t>((i + 1) * members));
    format_->decode(parts[0], size_of(parts[0]), chunk.count, sum);
    for (size_t member = 1; member < members; ++member)
      format_->decode_add(parts[member], size_of(parts[member]), chunk.count, sum);
    if (sums_only_) continue;
    if (factor_ != 1.0F) scale(factor_, sum, sum, chunk.count);
    carry(chunk.carry, chunk.result_residual, chunk.count);
    const size_t bytes = chunk.result_whole
                             ? format_->encode_whole(sum, chunk.count, at)
                             : format_->encode_result(sum, chunk.result_residual, chunk.count, chunk.step, parts, at);
    give_out(at, chunk, thread);
    at += bytes;
  }
  task->bytes = static_cast<size_t>(at - task->room);
}

void CompressedAllreduce::send_results(size_t bytes) {
  plan_.collective = Collective::kAllgather;
  plan_.send_rows.push_back(bytes);
}

void CompressedAllreduce::give_out(const Byte* encoded, const CompressedChunk& chunk, size_t thread) const {
  const size_t bytes = size_of(encoded);
  if (results_ != nullptr) (*results_)[chunk.result] = Piece{encoded, nullptr, bytes};
  if (chunk.slot != nullptr) {
    format_->check(encoded, bytes, chunk.count);
    std::memcpy(chunk.slot, encoded, bytes);
    return;
  }
  if (float* const last_result = chunk.momenta.last_result) {
    float* const result = scratch(thread);
    format_->decode(encoded, bytes, chunk.count, result);
    const uint32_t largest = kernels::add_to_residual(result, -chunk.momenta.momentum, last_result, chunk.count);
    std::memcpy(chunk.out, last_result, chunk.count * sizeof(float));
    if (largest >= kernels::kNotFinite) forget_not_finite(result, chunk.count);
    std::memcpy(last_result, result, chunk.count * sizeof(float));
    return;
  }
  if (last_) format_->decode_streamed(encoded, bytes, chunk.count, chunk.out);
  else format_->decode(encoded, bytes, chunk.count, chunk.out);
}

void CompressedAllreduce::finish() {
  Load others;
  for (int owner = 0; owner < members_; ++owner)
    if (owner != me_) others.add(load_of(owner));
  encoded_.resize(others.chunks);
  tasks_.clear();
  const Byte* from = received().data();
  size_t found = 0;
  for (int owner = 0; owner < members_; ++owner) {
    const size_t bytes = received_bytes_[static_cast<size_t>(owner)];
    const Byte* const begin = from;
    from += bytes;
    if (owner == me_) continue;
    const size_t chunks = chunks_[static_cast<size_t>(owner)].size(), first = tasks_.size();
    find_chunks(begin, bytes, chunks, 1, encoded_.data() + found);
    cut_into_tasks(owner, chunks_in_task(others));
    for (size_t i = first; i < tasks_.size(); ++i) tasks_[i].found = found + tasks_[i].begin;
    found += chunks;
  }
  in_parallel(others, [this](size_t thread, Task* task) {
    const std::vector<CompressedChunk>& chunks = chunks_[static_cast<size_t>(task->owner)];
    for (size_t i = task->begin; i < task->end; ++i)
      give_out(encoded_[task->found + i - task->begin], chunks[i], thread);
  });
}

Byte* CompressedAllreduce::allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>&) {
  size_t total = 0;
  for (int member = 0; member < members_; ++member) {
    // Of us an owner gets all our chunks; of an owner everybody gets all of its chunks.
    const std::vector<CompressedChunk>& chunks = chunks_[static_cast<size_t>(stage_ == Stage::kReduce ? me_ : member)];
    size_t most = 0;
    for (const CompressedChunk& chunk : chunks) most += format_->most_bytes(chunk.count);
    const size_t size = bytes[static_cast<size_t>(member)];
    if (size > most)
      fail(ErrorKind::kIo, "[collective] member " + std::to_string(member) + " announced " + std::to_string(size) +
                               " bytes of encoded gradients, expected at most " + std::to_string(most));
    total += size;
  }
  received_bytes_ = bytes;
  std::vector<Byte>& memory = received();
  if (memory.size() < total) memory.resize(total);
  return memory.data();
}

// What spread() sends may lie where the contributions came.
std::vector<Byte>& CompressedAllreduce::received() {
  return sums_only_ && stage_ == Stage::kFinish ? buffers_->passed_on : buffers_->received;
}

}  // namespace perseus

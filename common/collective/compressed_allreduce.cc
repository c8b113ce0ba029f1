// Encode, add in rank order, encode again.
#include "collective/compressed_allreduce.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"

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

// Where so many chunks are that came one after the other; found[i * stride] is the i-th.
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

// Of so many. One thread does them all; several have enough tasks to end at about the same time.
size_t CompressedAllreduce::chunks_together(size_t chunks) const {
  const auto threads = static_cast<size_t>(threads_->threads());
  return std::max(threads == 1 ? chunks : chunks / (3 * threads), size_t{1});
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

// Calls body(thread, task) for all tasks.
template <class Body>
void CompressedAllreduce::in_parallel(const Body& body) {
  threads_->parallel_for(tasks_.size(), [&](size_t task, size_t thread) { body(thread, &tasks_[task]); });
}

void CompressedAllreduce::select() {
  buffers_->selected.clear();
  slices_.push_back(order_.size());
  const size_t together = chunks_together(order_.size());
  threads_->parallel_for((order_.size() + together - 1) / together, [&](size_t task, size_t) {
    for (size_t i = task * together; i < std::min((task + 1) * together, order_.size()); ++i) {
      CompressedChunk& chunk = chunks_[order_[i].owner][order_[i].index];
      // Its place for the result serves: a selected chunk is looked at more than once.
      if (prescale_ != 1.0F) {
        scale(prescale_, chunk.in, chunk.out, chunk.count);
        chunk.in = chunk.out;
      }
      carry(chunk.carry, chunk.residual, chunk.count);
    }
  });
  for (size_t i = 0; i + 1 < slices_.size(); ++i) {
    const Place *const begin = order_.data() + slices_[i], *const end = order_.data() + slices_[i + 1];
    if (begin == end) continue;
    slice_.clear();
    for (const Place* place = begin; place != end; ++place) {
      const CompressedChunk& chunk = chunks_[place->owner][place->index];
      slice_.push_back({chunk.in, chunk.residual, chunk.count});
    }
    format_->select(slice_.data(), slice_.size(), chunks_[begin->owner][begin->index].step, threads_,
                    &buffers_->selected);
    for (size_t c = 0; c < slice_.size(); ++c) chunks_[begin[c].owner][begin[c].index].selection = slice_[c];
  }
}

void CompressedAllreduce::encode() {
  size_t total = 0;
  for (const std::vector<CompressedChunk>& chunks : chunks_) total += chunks.size();
  tasks_.clear();
  for (int owner = 0; owner < members_; ++owner) cut_into_tasks(owner, chunks_together(total));
  give_room(true, &buffers_->own);
  give_room(false, &buffers_->sent);
  encoded_.resize(chunks_[static_cast<size_t>(me_)].size() * static_cast<size_t>(members_));
  in_parallel([this](size_t thread, Task* task) { encode(thread, task); });
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
    if (format_->selects()) {
      at += format_->encode_selected(chunk.selection, buffers_->selected.data(), at);
      continue;
    }
    const float* x = chunk.in;
    if (prescale_ != 1.0F) {
      scale(prescale_, x, scratch(thread), chunk.count);
      x = scratch(thread);
    }
    carry(chunk.carry, chunk.residual, chunk.count);
    at += format_->encode(x, chunk.residual, chunk.count, chunk.step, at);
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
  cut_into_tasks(me_, chunks_together(own));
  if (!sums_only_) give_room(true, &buffers_->sent);
  in_parallel([this](size_t thread, Task* task) { reduce(thread, task); });
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
    const size_t bytes = format_->encode_result(sum, chunk.result_residual, chunk.count, chunk.step, parts, at);
    give_out(at, chunk);
    at += bytes;
  }
  task->bytes = static_cast<size_t>(at - task->room);
}

void CompressedAllreduce::send_results(size_t bytes) {
  plan_.collective = Collective::kAllgather;
  plan_.send_rows.push_back(bytes);
}

void CompressedAllreduce::give_out(const Byte* encoded, const CompressedChunk& chunk) const {
  const size_t bytes = size_of(encoded);
  if (results_ != nullptr) (*results_)[chunk.result] = Piece{encoded, nullptr, bytes};
  if (last_) format_->decode_streamed(encoded, bytes, chunk.count, chunk.out);
  else format_->decode(encoded, bytes, chunk.count, chunk.out);
}

void CompressedAllreduce::finish() {
  size_t total = 0;
  for (const std::vector<CompressedChunk>& chunks : chunks_) total += chunks.size();
  total -= chunks_[static_cast<size_t>(me_)].size();
  encoded_.resize(total);
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
    cut_into_tasks(owner, chunks_together(total));
    for (size_t i = first; i < tasks_.size(); ++i) tasks_[i].found = found + tasks_[i].begin;
    found += chunks;
  }
  in_parallel([this](size_t, Task* task) {
    const std::vector<CompressedChunk>& chunks = chunks_[static_cast<size_t>(task->owner)];
    for (size_t i = task->begin; i < task->end; ++i) give_out(encoded_[task->found + i - task->begin], chunks[i]);
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

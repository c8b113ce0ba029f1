// Encode, add in rank order, encode again.
#include "collective/compressed_allreduce.h"

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

}  // namespace

// The next chunk; its size is in its first four bytes.
const Byte* CompressedAllreduce::Reader::take(size_t* bytes) {
  uint32_t size = 0;
  if (end - at >= static_cast<ptrdiff_t>(sizeof size)) std::memcpy(&size, at, sizeof size);
  if (size < sizeof size || size > static_cast<size_t>(end - at))
    fail(ErrorKind::kIo, "[collective] encoded gradients from a peer end too early");
  const Byte* chunk = at;
  at += size;
  *bytes = size;
  return chunk;
}

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

void CompressedAllreduce::use(CompressedBuffers* buffers) {
  buffers_ = buffers;
  buffers_->scratch.resize(2 * kWireChunk);
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

// Grows `buffer` so that the encodings of `chunks` have room from `begin` on.
Byte* CompressedAllreduce::room_for(const std::vector<CompressedChunk>& chunks, std::vector<Byte>* buffer,
                                    size_t begin) const {
  size_t most = 0;
  for (const CompressedChunk& chunk : chunks) most += format_->most_bytes(chunk.count);
  if (buffer->size() < begin + most) buffer->resize(begin + most);
  return buffer->data() + begin;
}

void CompressedAllreduce::select() {
  buffers_->selected.clear();
  slices_.push_back(order_.size());
  for (size_t i = 0; i + 1 < slices_.size(); ++i) {
    const Place *const begin = order_.data() + slices_[i], *const end = order_.data() + slices_[i + 1];
    if (begin == end) continue;
    slice_.clear();
    for (const Place* place = begin; place != end; ++place) {
      CompressedChunk& chunk = chunks_[place->owner][place->index];
      // Its place for the result serves: a selected chunk is looked at more than once.
      if (prescale_ != 1.0F) {
        scale(prescale_, chunk.in, chunk.out, chunk.count);
        chunk.in = chunk.out;
      }
      carry(chunk.carry, chunk.residual, chunk.count);
      slice_.push_back({chunk.in, chunk.residual, chunk.count});
    }
    format_->select(slice_.data(), slice_.size(), chunks_[begin->owner][begin->index].step, &buffers_->selected);
    for (size_t c = 0; c < slice_.size(); ++c) chunks_[begin[c].owner][begin[c].index].selection = slice_[c];
  }
}

void CompressedAllreduce::encode() {
  plan_.clear();
  plan_.collective = Collective::kAlltoall;
  size_t begin = 0;
  for (int owner = 0; owner < members_; ++owner) {
    const std::vector<CompressedChunk>& chunks = chunks_[static_cast<size_t>(owner)];
    const bool own = owner == me_;
    Byte* const first = room_for(chunks, own ? &buffers_->own : &buffers_->sent, own ? 0 : begin);
    Byte* at = first;
    for (const CompressedChunk& chunk : chunks) {
      if (format_->selects()) {
        at += format_->encode_selected(chunk.selection, buffers_->selected.data(), at);
        continue;
      }
      const float* x = chunk.in;
      if (prescale_ != 1.0F) {
        scale(prescale_, x, buffers_->scratch.data(), chunk.count);
        x = buffers_->scratch.data();
      }
      carry(chunk.carry, chunk.residual, chunk.count);
      at += format_->encode(x, chunk.residual, chunk.count, chunk.step, at);
    }
    const size_t bytes = own ? 0 : static_cast<size_t>(at - first);
    plan_.send_bytes.push_back(bytes);
    plan_.send_rows.push_back(bytes);
    begin += bytes;
  }
  plan_.pieces.push_back(Piece{buffers_->sent.data(), nullptr, begin});
}

void CompressedAllreduce::reduce() {
  const std::vector<CompressedChunk>& chunks = chunks_[static_cast<size_t>(me_)];
  readers_.clear();
  const Byte* from = received().data();
  for (int member = 0; member < members_; ++member) {
    const size_t bytes = received_bytes_[static_cast<size_t>(member)];
    const std::vector<Byte>& own = buffers_->own;
    if (member == me_) readers_.push_back({own.data(), own.data() + own.size()});
    else readers_.push_back({from, from + bytes});
    from += bytes;
  }
  Byte* const first = sums_only_ ? nullptr : room_for(chunks, &buffers_->sent, 0);
  Byte* at = first;
  for (const CompressedChunk& chunk : chunks) {
    float* const sum = sums_only_ ? chunk.out : buffers_->scratch.data() + kWireChunk;
    parts_.clear();
    for (int member = 0; member < members_; ++member) {
      size_t bytes = 0;
      const Byte* encoded = readers_[static_cast<size_t>(member)].take(&bytes);
      parts_.push_back(encoded);
      if (member == 0) format_->decode(encoded, bytes, chunk.count, sum);
      else format_->decode_add(encoded, bytes, chunk.count, sum);
    }
    if (sums_only_) continue;
    if (factor_ != 1.0F) scale(factor_, sum, sum, chunk.count);
    carry(chunk.carry, chunk.result_residual, chunk.count);
    const size_t bytes = format_->encode_result(sum, chunk.result_residual, chunk.count, chunk.step, parts_, at);
    give_out(at, bytes, chunk);
    at += bytes;
  }
  if (sums_only_) return;
  const size_t bytes = static_cast<size_t>(at - first);
  plan_.clear();
  plan_.pieces.push_back(Piece{first, nullptr, bytes});
  send_results(bytes);
}

void CompressedAllreduce::send_results(size_t bytes) {
  plan_.collective = Collective::kAllgather;
  plan_.send_rows.push_back(bytes);
}

void CompressedAllreduce::give_out(const Byte* encoded, size_t bytes, const CompressedChunk& chunk) const {
  if (results_ != nullptr) (*results_)[chunk.result] = Piece{encoded, nullptr, bytes};
  if (last_) format_->decode_streamed(encoded, bytes, chunk.count, chunk.out);
  else format_->decode(encoded, bytes, chunk.count, chunk.out);
}

void CompressedAllreduce::finish() {
  const Byte* from = received().data();
  for (int owner = 0; owner < members_; ++owner) {
    const size_t bytes = received_bytes_[static_cast<size_t>(owner)];
    Reader reader{from, from + bytes};
    from += bytes;
    if (owner == me_) continue;
    for (const CompressedChunk& chunk : chunks_[static_cast<size_t>(owner)]) {
      size_t size = 0;
      const Byte* encoded = reader.take(&size);
      give_out(encoded, size, chunk);
    }
  }
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

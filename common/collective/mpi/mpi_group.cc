// Cuts collectives into rounds whose counts fit into MPI's ints.
#include "collective/mpi/mpi_group.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace perseus {
namespace {

// Of one part: shorter slices would cost more in calls than they save in memory.
constexpr size_t kLeastSlice = 64 * 1024;

// What a member tells another before an allgather or alltoall.
struct Announcement {
  uint64_t bytes, rows;  // for the one that reads it
  uint64_t longest;      // for anybody
};

bool reduces(Collective collective) {
  return collective == Collective::kAllreduce || collective == Collective::kReduceScatter;
}

}  // namespace

void MpiGroup::Parts::assign(const std::vector<size_t>& sizes) {
  bytes = sizes;
  begin.clear();
  size_t at = 0;
  for (size_t size : sizes) {
    begin.push_back(at);
    at += size;
  }
}

size_t MpiGroup::Parts::longest() const { return bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end()); }

MpiGroup::MpiGroup(const mpi::Library& library, mpi::Handle communicator, int members, int me, size_t round_bytes)
    : library_(library), communicator_(communicator), members_(members), me_(me), round_bytes_(round_bytes) {}

MpiGroup::~MpiGroup() { abort(); }

bool MpiGroup::serves(const Work& work) const {
  if (work.staged != nullptr || work.device != Device()) return false;
  if (!reduces(work.plan->collective)) return true;
  const kernels::ReduceSpec& reduction = work.plan->reduction;
  const bool factors = reduction.prescale != 1 || reduction.postscale != 1 || reduction.divisor != 1;
  // Integers are scaled in double and rounded once, which takes all operands.
  return library_.op_of(reduction.dtype, reduction.op) != nullptr && (dtype_is_float(reduction.dtype) || !factors);
}

size_t MpiGroup::staging_bytes() const {
  size_t bytes = 0;
  for (const std::unique_ptr<Round>& round : rounds_)
    if (round) bytes += round->out.capacity() + round->in.capacity();
  return bytes;
}

// ---- beginning ----

Operation& MpiGroup::plan(const Work& work) {
  plan_ = work.plan;
  sink_ = work.sink;
  done_ = false;
  begun_ = ended_ = count_ = 0;
  const size_t members = static_cast<size_t>(members_);
  switch (plan_->collective) {
    case Collective::kAllreduce:
    case Collective::kBroadcast:
      sent_.assign({plan_->bytes()});
      set_rounds(sent_.longest(), 1);
      break;
    case Collective::kReduceScatter:
      sent_.assign(plan_->parts);
      set_rounds(sent_.longest(), members);
      break;
    case Collective::kSpread:
      received_.assign(plan_->parts);
      set_rounds(received_.longest(), members);
      break;
    case Collective::kAllgather:
      sent_.assign({total_bytes(plan_->pieces)});
      announce_sizes();
      break;
    case Collective::kAlltoall:
      sent_.assign(plan_->send_bytes);
      announce_sizes();
      break;
  }
  return *this;
}

void MpiGroup::set_rounds(size_t longest, size_t parts) {
  slice_bytes_ = std::max(round_bytes_ / parts / kLeastSlice, size_t{1}) * kLeastSlice;
  count_ = (longest + slice_bytes_ - 1) / slice_bytes_;
}

MpiGroup::Round& MpiGroup::fresh(std::unique_ptr<Round>* round) const {
  if (!*round) *round = std::make_unique<Round>();
  (*round)->under_way = true;
  return **round;
}

bool MpiGroup::ended(Round* round) const {
  if (!library_.test(&round->request)) return false;
  round->under_way = false;
  return true;
}

void MpiGroup::announce_sizes() {
  Round& round = fresh(&sizes_);
  std::vector<Announcement> ours(static_cast<size_t>(members_));
  const bool all_to_all = plan_->collective == Collective::kAlltoall;
  for (size_t i = 0; i < ours.size(); ++i) {
    const size_t part = all_to_all ? i : 0;
    ours[i] = Announcement{sent_.bytes[part], plan_->send_rows[part], sent_.longest()};
  }
  const size_t bytes = ours.size() * sizeof(Announcement);
  round.out.resize(bytes);
  round.in.resize(bytes);
  std::memcpy(round.out.data(), ours.data(), bytes);
  Parts parts;
  parts.assign(std::vector<size_t>(ours.size(), sizeof(Announcement)));
  slice_bytes_ = sizeof(Announcement);
  cut(parts, 0, 1, &round.out_counts, &round.out_places);
  library_.check("MPI_Ialltoallv",
                 library_.call().alltoall(round.out.data(), round.out_counts.data(), round.out_places.data(),
                                          library_.bytes(), round.in.data(), round.out_counts.data(),
                                          round.out_places.data(), library_.bytes(), communicator_, &round.request));
}

void MpiGroup::take_sizes() {
  std::vector<Announcement> theirs(static_cast<size_t>(members_));
  std::memcpy(theirs.data(), sizes_->in.data(), sizes_->in.size());
  std::vector<size_t> bytes;
  std::vector<uint64_t> rows;
  size_t longest = 0;
  for (const Announcement& each : theirs) {
    bytes.push_back(static_cast<size_t>(each.bytes));
    rows.push_back(each.rows);
    longest = std::max(longest, static_cast<size_t>(each.longest));
  }
  received_.assign(bytes);
  Byte* memory = sink_->allocate(bytes, rows);
  gathered_.assign(1, Piece{nullptr, memory, received_.begin.back() + received_.bytes.back()});
  set_rounds(longest, static_cast<size_t>(members_));
}

// ---- rounds ----

size_t MpiGroup::slice(size_t bytes, uint64_t round) const {
  const size_t begin = round * slice_bytes_;
  return begin >= bytes ? 0 : std::min(slice_bytes_, bytes - begin);
}

size_t MpiGroup::cut(const Parts& parts, uint64_t round, size_t unit, std::vector<int>* counts,
                     std::vector<int>* places) const {
  counts->clear();
  places->clear();
  size_t at = 0;
  for (size_t bytes : parts.bytes) {
    const size_t length = slice(bytes, round);
    counts->push_back(static_cast<int>(length / unit));
    places->push_back(static_cast<int>(at / unit));
    at += length;
  }
  return at;
}

void MpiGroup::pack(size_t begin, size_t bytes, Byte* packed) const {
  Cursor source(plan_->pieces, begin);
  kernels::ReduceSpec scale;
  scale.dtype = plan_->reduction.dtype;
  scale.prescale = plan_->reduction.prescale;
  const bool scales = reduces(plan_->collective) && scale.prescale != 1;
  for (size_t done = 0; done < bytes;) {
    const size_t run = std::min(bytes - done, source.contiguous());
    const void* in = source.in();
    if (scales) kernels::reduce(scale, packed + done, nullptr, &in, 1, run / dtype_size(scale.dtype), false);
    else kernels::copy(packed + done, in, run, false);
    source.advance(run);
    done += run;
  }
}

void MpiGroup::pack(uint64_t round, const Parts& parts, std::vector<Byte>* out) const {
  size_t at = 0;
  for (size_t i = 0; i < parts.bytes.size(); ++i) {
    const size_t length = slice(parts.bytes[i], round);
    out->resize(std::max(out->size(), at + length));
    pack(parts.begin[i] + round * slice_bytes_, length, out->data() + at);
    at += length;
  }
}

void MpiGroup::unpack(const Byte* packed, size_t begin, size_t bytes, const std::vector<Piece>& target) const {
  Cursor out(target, begin);
  kernels::ReduceSpec scale;
  scale.dtype = plan_->reduction.dtype;
  scale.postscale = plan_->reduction.postscale;
  scale.divisor = plan_->reduction.divisor;
  const bool scales = reduces(plan_->collective) && (scale.postscale != 1 || scale.divisor != 1);
  for (size_t done = 0; done < bytes;) {
    const size_t run = std::min(bytes - done, out.contiguous());
    const void* in = packed + done;
    if (scales) kernels::reduce(scale, out.out(), nullptr, &in, 1, run / dtype_size(scale.dtype), false);
    else kernels::copy(out.out(), in, run, false);
    out.advance(run);
    done += run;
  }
}

void MpiGroup::begin_allreduce(Round* round) {
  const kernels::ReduceSpec& reduction = plan_->reduction;
  pack(begun_, sent_, &round->out);
  const size_t count = slice(sent_.bytes[0], begun_) / dtype_size(reduction.dtype);
  library_.check("MPI_Iallreduce", library_.call().allreduce(library_.in_place(), round->out.data(),
                                                             static_cast<int>(count), library_.type_of(reduction.dtype),
                                                             library_.op_of(reduction.dtype, reduction.op),
                                                             communicator_, &round->request));
}

void MpiGroup::begin_broadcast(Round* round) {
  const size_t bytes = slice(sent_.bytes[0], begun_);
  round->out.resize(std::max(round->out.size(), bytes));
  if (me_ == plan_->root) pack(begun_, sent_, &round->out);
  library_.check("MPI_Ibcast", library_.call().broadcast(round->out.data(), static_cast<int>(bytes), library_.bytes(),
                                                         plan_->root, communicator_, &round->request));
}

void MpiGroup::begin_reduce_scatter(Round* round) {
  const kernels::ReduceSpec& reduction = plan_->reduction;
  pack(begun_, sent_, &round->out);
  cut(sent_, begun_, dtype_size(reduction.dtype), &round->out_counts, &round->out_places);
  round->in.resize(std::max(round->in.size(), slice(sent_.bytes[static_cast<size_t>(me_)], begun_)));
  library_.check("MPI_Ireduce_scatter",
                 library_.call().reduce_scatter(
                     round->out.data(), round->in.data(), round->out_counts.data(), library_.type_of(reduction.dtype),
                     library_.op_of(reduction.dtype, reduction.op), communicator_, &round->request));
}

void MpiGroup::begin_spread(Round* round) {
  const size_t own = received_.bytes[static_cast<size_t>(me_)], bytes = slice(own, begun_);
  round->out.resize(std::max(round->out.size(), bytes));
  pack(begun_ * slice_bytes_, bytes, round->out.data());
  const size_t all = cut(received_, begun_, 1, &round->in_counts, &round->in_places);
  round->in.resize(std::max(round->in.size(), all));
  library_.check("MPI_Iallgatherv",
                 library_.call().allgather(round->out.data(), static_cast<int>(bytes), library_.bytes(),
                                           round->in.data(), round->in_counts.data(), round->in_places.data(),
                                           library_.bytes(), communicator_, &round->request));
}

void MpiGroup::begin_alltoall(Round* round) {
  pack(begun_, sent_, &round->out);
  cut(sent_, begun_, 1, &round->out_counts, &round->out_places);
  const size_t all = cut(received_, begun_, 1, &round->in_counts, &round->in_places);
  round->in.resize(std::max(round->in.size(), all));
  library_.check("MPI_Ialltoallv",
                 library_.call().alltoall(round->out.data(), round->out_counts.data(), round->out_places.data(),
                                          library_.bytes(), round->in.data(), round->in_counts.data(),
                                          round->in_places.data(), library_.bytes(), communicator_, &round->request));
}

void MpiGroup::begin_round() {
  Round& round = fresh(&rounds_[begun_ % kRounds]);
  switch (plan_->collective) {
    case Collective::kAllreduce:
      begin_allreduce(&round);
      break;
    case Collective::kBroadcast:
      begin_broadcast(&round);
      break;
    case Collective::kReduceScatter:
      begin_reduce_scatter(&round);
      break;
    case Collective::kAllgather:
    case Collective::kSpread:
      begin_spread(&round);
      break;
    case Collective::kAlltoall:
      begin_alltoall(&round);
      break;
  }
  ++begun_;
}

void MpiGroup::end_round() {
  const Round& round = *rounds_[ended_ % kRounds];
  const size_t begin = ended_ * slice_bytes_;
  switch (plan_->collective) {
    case Collective::kAllreduce:
    case Collective::kBroadcast:
      unpack(round.out.data(), begin, slice(sent_.bytes[0], ended_), plan_->pieces);
      break;
    case Collective::kReduceScatter:
      unpack(round.in.data(), begin, slice(sent_.bytes[static_cast<size_t>(me_)], ended_), plan_->result);
      break;
    case Collective::kAllgather:
    case Collective::kSpread:
    case Collective::kAlltoall:
      for (size_t i = 0; i < received_.bytes.size(); ++i)
        unpack(round.in.data() + round.in_places[i], received_.begin[i] + begin, slice(received_.bytes[i], ended_),
               plan_->sizes_vary() ? gathered_ : plan_->result);
      break;
  }
  ++ended_;
}

bool MpiGroup::step() {
  if (done_) return false;
  if (sizes_ && sizes_->under_way) {
    if (!ended(sizes_.get())) return false;
    take_sizes();
  }
  bool moved = false;
  while (ended_ < begun_ && ended(rounds_[ended_ % kRounds].get())) {
    end_round();
    moved = true;
  }
  while (begun_ < count_ && begun_ - ended_ < kRounds) {
    begin_round();
    moved = true;
  }
  done_ = ended_ == count_;
  return moved || done_;
}

void MpiGroup::abort() noexcept {
  done_ = true;
  for (std::unique_ptr<Round>* round : {&sizes_, &rounds_[0], &rounds_[1]}) {
    if (!*round || !(*round)->under_way) continue;
    // MPI goes on using the memory, maybe until the process ends.
    mpi::leave_unfinished();
    round->release();
  }
}

std::vector<int> MpiGroup::waiting_for() const {
  // MPI does not tell.
  std::vector<int> others;
  for (int member = 0; member < members_; ++member)
    if (member != me_) others.push_back(member);
  return others;
}

}  // namespace perseus

// What a peer says on its link to this rank: in a negotiation round, in exchanges, with sends and receives, and about
// NCCL.
#include "collective/link_group.h"
#include "collective/nccl/letters.h"
#include "control/announcement.h"
#include "control/round.h"
#include "fuzz.h"
#include "point_to_point/peer_link.h"

using namespace perseus;
using perseus_fuzz::Input;
using perseus_fuzz::PlayedLink;

namespace {

constexpr uint32_t kEpoch = 3;
constexpr int kSteps = 64;

void say_rest(Input* input, PlayedLink* link) {
  link->say(input->data(), input->left());
  input->skip(input->left());
}

// As Round::Frame, which is_still_a_frame() makes sure of.
struct Frame {
  uint32_t magic, epoch, group, step;
  uint64_t round;
  uint32_t words, body_bytes;
  unsigned char inlined[216];
};

bool is_still_a_frame() PERSEUS_NO_THREAD_ANALYSIS {
  PlayedLink out(false), in(false);
  Round round({&out}, {&in}, 2, 0, kEpoch, 0);
  Frame frame{};
  frame.magic = 0x50524e44;
  frame.epoch = kEpoch;
  frame.round = round.number() + 1;
  in.say(&frame, sizeof frame);
  round.content().announced.assign(2, "");
  round.begin();
  while (!round.idle() && round.step()) continue;
  return round.idle();
}

void play_round(Input* input, PlayedLink* link) PERSEUS_REQUIRES(progress_lock) {
  static const bool understood = is_still_a_frame();
  perseus_fuzz::expect(understood, "this target knows how a round begins");
  Frame frame{};
  PlayedLink out(link->has_windows());
  Round round({&out}, {link}, 2, 0, kEpoch, 0);
  frame.magic = 0x50524e44;
  frame.epoch = kEpoch;
  frame.round = round.number() + 1;
  frame.words = input->byte() % 32;
  frame.body_bytes = input->value<uint16_t>() % 2000;
  const std::vector<uint8_t> inlined = input->take(sizeof frame.inlined);
  std::copy(inlined.begin(), inlined.end(), frame.inlined);
  frame = input->changed(frame);
  link->say(&frame, sizeof frame);
  say_rest(input, link);
  round.content().bits.assign(2, ~uint64_t{0});
  round.content().announced.assign(2, "");
  round.begin();
  for (int i = 0; i < kSteps && !round.idle(); ++i)
    if (!round.step()) break;
  if (!round.idle()) return;
  AnnouncementReader reader(round.content().announced[1]);
  while (!reader.at_end()) reader.next();
}

// Room for results of which the peer tells the size.
class Room : public OutputSink {
 public:
  Byte* allocate(const std::vector<size_t>& bytes, const std::vector<uint64_t>& rows) override {
    size_t total = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (rows[i] > 1024 || bytes[i] != rows[i] * sizeof(float)) fail(ErrorKind::kIo, "too many rows");
      total += bytes[i];
    }
    room_.assign(total, 0);
    room_.shrink_to_fit();
    return room_.data();
  }

 private:
  std::vector<Byte> room_;
};

void play_exchange(Input* input, PlayedLink* link) PERSEUS_REQUIRES(progress_lock) {
  constexpr Collective kCollectives[] = {Collective::kAllreduce, Collective::kBroadcast, Collective::kReduceScatter,
                                         Collective::kAllgather, Collective::kAlltoall,  Collective::kSpread};
  constexpr Algorithm kAlgorithms[] = {Algorithm::kPairwise, Algorithm::kRing, Algorithm::kHalvingDoubling,
                                       Algorithm::kRecursiveDoubling};
  ExchangePlan plan;
  plan.collective = kCollectives[input->choice(std::size(kCollectives))];
  if (plan.collective == Collective::kAllreduce) plan.algorithm = kAlgorithms[input->choice(std::size(kAlgorithms))];
  const size_t count = 2 + 2 * input->choice(100);
  std::vector<float> in(count, 1.0F), out(count, 0.0F);
  in.shrink_to_fit();
  out.shrink_to_fit();
  Byte* const from = reinterpret_cast<Byte*>(in.data());
  Byte* const to = reinterpret_cast<Byte*>(out.data());
  const size_t bytes = count * sizeof(float);
  plan.reduction.dtype = DType::kFloat32;
  switch (plan.collective) {
    case Collective::kAllreduce:
    case Collective::kBroadcast:
      plan.root = 1;
      plan.pieces.push_back({from, to, bytes});
      break;
    case Collective::kReduceScatter:
      plan.parts = {bytes / 2, bytes - bytes / 2};
      plan.pieces.push_back({from, nullptr, bytes});
      plan.result.push_back({nullptr, to, plan.parts[0]});
      break;
    case Collective::kSpread:
      plan.parts = {bytes / 2, bytes - bytes / 2};
      plan.pieces.push_back({from, nullptr, plan.parts[0]});
      plan.result.push_back({nullptr, to, bytes});
      break;
    case Collective::kAllgather:
    case Collective::kAlltoall:
      plan.pieces.push_back({from, nullptr, bytes});
      plan.send_rows = {count};
      if (plan.collective == Collective::kAlltoall) {
        plan.send_rows = {count / 2, count - count / 2};
        for (const uint64_t rows : plan.send_rows) plan.send_bytes.push_back(rows * sizeof(float));
      }
      break;
  }
  ExchangeHeader header;
  describe(plan, &header);
  header.epoch = kEpoch;
  header.result_bytes = bytes / 2;
  if (plan.sizes_vary()) {
    header.rows = input->byte();
    header.result_bytes = header.rows * sizeof(float);
  }
  header = input->changed(header);
  link->say(&header, sizeof header);
  say_rest(input, link);
  LinkGroup group({nullptr, link}, 0, kEpoch, Channel{0, 0});
  Room room;
  Work work;
  work.plan = &plan;
  work.sink = plan.sizes_vary() ? &room : nullptr;
  Operation& operation = group.plan(work);
  for (int i = 0; i < kSteps && !operation.done(); ++i)
    if (!operation.step()) break;
  operation.abort();
}

// Takes what is announced where it is small, and refuses what comes in odd sizes.
class Receiver : public PeerLink::Listener {
 public:
  void on_announced(PeerLink& from, const Announcement& message) override {
    if (message.whole) {
      from.accept(message.id);
      return;
    }
    if (message.bytes > 4096 || message.tag % 2 != 0) {
      from.refuse(message.id, 1);
      return;
    }
    entries_.push_back(std::make_unique<Entry>());
    entries_.back()->bytes = message.bytes;
    memory_.push_back(std::make_unique<Byte[]>(message.bytes));
    entries_.back()->buffers.push_back({nullptr, memory_.back().get()});
    from.receive(message.id, entries_.back().get());
  }
  void on_accepted(Entry*) override {}
  void on_refused(PeerLink&, Entry*, uint64_t) override {}
  void on_moved(Entry*) override {}
  void on_bye(PeerLink&, const std::vector<Entry*>&) override {}

 private:
  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<std::unique_ptr<Byte[]>> memory_;
};

void play_messages(Input* input, PlayedLink* link) PERSEUS_REQUIRES(progress_lock) {
  Receiver receiver;
  PeerLink peer(1, link, kEpoch, &receiver);
  std::vector<Byte> memory(10'000, 1);
  Entry small, large;
  small.bytes = 100;
  large.bytes = memory.size();
  for (Entry* entry : {&small, &large}) {
    entry->buffers.push_back({memory.data(), memory.data()});
    peer.announce(entry);
  }
  for (size_t said = 1 + input->choice(6); said > 0; --said) {
    PointToPointHeader header;
    header.magic = 0x50503250;
    header.epoch = kEpoch;
    header.type = static_cast<PointToPointType>(1 + input->choice(5));
    header.id = 1 + input->choice(4);
    header.tag = input->byte() % 3;
    header.bytes = input->value<uint16_t>() % 6000;
    header.length = header.type == PointToPointType::kAnnounce && header.bytes <= kMostEager
                        ? static_cast<uint32_t>(header.bytes)
                        : input->byte();
    header = input->changed(header);
    link->say(&header, sizeof header);
    std::vector<uint8_t> behind = input->take(header.length % 8192);
    behind.resize(header.length % 8192);
    link->say(behind.data(), behind.size());
  }
  for (int i = 0; i < kSteps; ++i)
    if (!peer.step(i, true)) break;
}

void play_letters(Input* input, PlayedLink* link) PERSEUS_REQUIRES(progress_lock) {
  Letters letters({nullptr, link}, 0, kEpoch);
  for (size_t said = 1 + input->choice(3); said > 0; --said) {
    Letter letter;
    letter.epoch = kEpoch;
    letter.kind = static_cast<Letter::Kind>(input->choice(6));
    letter = input->changed(letter);
    link->say(&letter, sizeof letter);
  }
  say_rest(input, link);
  Letter letter;
  while (letters.receive(1, &letter)) perseus_fuzz::expect(letter.epoch == kEpoch, "letters are of this world");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) PERSEUS_NO_THREAD_ANALYSIS {
  Input input(data, size);
  const uint8_t choices = input.byte();
  PlayedLink link(choices % 2 == 0);
  try {
    switch (choices / 2 % 4) {
      case 0:
        play_round(&input, &link);
        break;
      case 1:
        play_exchange(&input, &link);
        break;
      case 2:
        play_messages(&input, &link);
        break;
      case 3:
        play_letters(&input, &link);
        break;
    }
  } catch (const Error&) {
  }
  return 0;
}

// Queues of letters over links.
#include "collective/nccl/letters.h"

#include <cstring>

#include "base/error.h"

namespace perseus {

Letters::Letters(const std::vector<Link*>& links, int me, uint32_t epoch)
    : peers_(links.size()), me_(me), epoch_(epoch) {
  for (size_t i = 0; i < links.size(); ++i)
    if (links[i] != nullptr) open(static_cast<int>(i), links[i]);
}

void Letters::open(int member, Link* link) {
  Peer& peer = peers_[static_cast<size_t>(member)];
  if (peer.open) return;
  peer.open = true;
  peer.sender = MessageSender(link);
  peer.receiver = MessageReceiver(link);
}

void Letters::begin(Peer* peer) {
  peer->piece.assign(1, Piece{reinterpret_cast<const Byte*>(&peer->out.front()), nullptr, sizeof(Letter)});
  peer->at = Cursor(peer->piece, 0);
}

void Letters::send(int member, Letter letter) {
  letter.epoch = epoch_;
  Peer& to = peer(member);
  to.out.push_back(letter);
  if (to.out.size() == 1) begin(&to);
}

void Letters::send_to_all(const Letter& letter) {
  for (int member = 0; member < members(); ++member)
    if (member != me_) send(member, letter);
}

bool Letters::flush() {
  bool moved = false;
  for (Peer& to : peers_) {
    while (!to.out.empty()) {
      const Moved now = to.sender.send(sizeof(Letter), &to.at, true);
      if (now == Moved::kNothing) break;
      moved = true;
      if (now != Moved::kAll) continue;
      to.out.pop_front();
      if (!to.out.empty()) begin(&to);
    }
  }
  return moved;
}

bool Letters::receive(int member, Letter* letter) {
  if (!peer(member).open) return false;
  MessageReceiver& from = peer(member).receiver;
  const ConstSpan window = from.whole(sizeof *letter);
  if (!window) return false;
  std::memcpy(letter, window.data, sizeof *letter);
  from.release(sizeof *letter);
  if (letter->magic != Letter::kMagic || letter->epoch != epoch_)
    fail(ErrorKind::kInternal,
         "[nccl] member " + std::to_string(member) + " sent something else than a letter of this world");
  letter->text[sizeof letter->text - 1] = '\0';
  return true;
}

}  // namespace perseus

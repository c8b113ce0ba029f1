// Allreduces as lists of steps in which a member sends one part of the buffer and receives another: halving-doubling,
// recursive doubling, ring. Pure functions; how steps are carried out is in stepped_exchange.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "topology/algorithm.h"
#include "transport/pieces.h"

namespace perseus {

struct ByteRange {
  size_t begin = 0, bytes = 0;
};

// Equal parts of whole elements, aligned, one for each entry of `parts`; the last ones may be empty.
void even_parts(size_t bytes, std::vector<size_t>* parts);
// Part `index` of `count` of them.
ByteRange even_part(size_t bytes, size_t count, size_t index);

struct Step {
  int to = -1, from = -1;  // members of the group, -1 = none. Never without bytes
  ByteRange send, receive;
  bool send_input = false;  // what was given, else what has been computed
  // The received bytes are reduced with our own bytes of that range, or replace them.
  bool reduce = false;
  bool own_input = false;  // our own bytes are what was given
  bool own_first = false;  // order of the operands
  bool last = false;       // the result of this reduction is final: factors apply
};

// The steps of member `me` of `members` (at least 2) for a buffer of `bytes`.
//
// Halving-doubling (Rabenseifner 2004, Optimization of collective reduction operations; Thakur et al. 2005) and
// recursive doubling combine the same pairs in the same order and so give the same bits: neighbours, then neighbouring
// pairs, fours, … Of a number of members that is no power of two, the first ones pair up before and one of each pair
// takes part.
void halving_doubling_steps(size_t bytes, int members, int me, std::vector<Step>* steps);
void recursive_doubling_steps(size_t bytes, int members, int me, std::vector<Step>* steps);
// Ring (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms): part i is reduced in the order i, i + 1, …,
// i - 1. `parts`: bytes of every part, one for each member.
void ring_steps(const std::vector<size_t>& parts, int me, std::vector<Step>* steps);

// The pieces (a tensor each) in the order of a ring's parts. Every piece is cut by itself, so that in which order an
// element is reduced depends on nothing but its tensor.
void order_for_ring(const std::vector<Piece>& pieces, std::vector<size_t>* parts, std::vector<Piece>* ordered);

}  // namespace perseus

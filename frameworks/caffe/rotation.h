// Averages another N-th of the parameters in every step, instead of gradients; perseus/gradients/turns.py explains
// it and does the same for Python's frameworks. Belongs to the thread that steps.
#pragma once

#include <cstddef>
#include <vector>

#include "caffe.h"

namespace perseus {

class Rotation {
 public:
  // The parameters are averaged once in `parts` steps, `parts` > 1.
  Rotation(perseus_context* context, int parts) : context_(context), parts_(parts) {}
  Rotation(const Rotation&) = delete;
  Rotation& operator=(const Rotation&) = delete;
  int parts() const { return parts_; }

  // Sends a part of the parameters, and corrects those that were sent in the step before. A collective.
  perseus_code take_turn(const perseus_values& parameters);
  // Gives all ranks the bits of the average, with nothing left under way. A collective.
  perseus_code make_equal(const perseus_values& parameters);
  // Waits for what is under way, whatever comes of it, and forgets it: other values replace the parameters. Not a
  // collective.
  void drop();

 private:
  // What of one part is under way, as one tensor. Empty if the part has no elements or nothing was sent.
  struct Exchange {
    int part = 0;
    std::vector<std::byte> sent, average;
    perseus_handle handle = 0;
  };

  perseus_code send(const perseus_values& parameters, int part, Exchange* exchange) const;
  perseus_code receive(Exchange* exchange) const;
  perseus_code correct(const perseus_values& parameters, Exchange* exchange) const;

  perseus_context* const context_;
  const int parts_;
  int turn_ = 0;
  Exchange under_way_;
};

// Finds out whether gradients that stay inside hosts (PERSEUS_CODEC_INSIDE) reach all ranks. A collective.
perseus_code all_inside(perseus_context* context, bool* all);

}  // namespace perseus

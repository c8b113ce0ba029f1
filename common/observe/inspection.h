// A signal that asks this process what it waits for. Of the whole process, whose worlds all answer; any thread.
#pragma once

#include <cstdint>

namespace perseus {

// Answers signal `number` from now on, unless that is 0, another handler has it, or one is answered already. Throws
// Error(kInvalidArgument) where signals of this number have another meaning.
void answer_inspections(int number);
// Which signal is answered; 0 = none.
int answered_signal();
// Somebody has put a handler in the place of ours, such as Python's faulthandler: ours is back, and calls it.
void call_before_answering();
// How often it was asked.
uint64_t inspections();
// Asks, as somebody else would, where the handler is still ours.
void inspect_this_process();

}  // namespace perseus

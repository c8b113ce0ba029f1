// A signal that asks this process what it waits for. Of the whole process, whose worlds all answer; any thread.
#pragma once

#include <cstdint>

namespace perseus {

// Answers signal `number` from now on, unless that is 0, another handler has it, or one is answered already. Python's
// faulthandler can come before it and shows where threads are.
void answer_inspections(int number);
// Which signal is answered; 0 = none.
int answered_signal();
// How often it was asked.
uint64_t inspections();
// Asks, as somebody else would, where a signal is answered.
void inspect_this_process();

}  // namespace perseus

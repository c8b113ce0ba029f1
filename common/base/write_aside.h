// Writing to pipes and disks, whose other end may make one wait for ever, by a thread of its own: whoever holds a lock
// goes on. Thread-safe.
#pragma once

#include <functional>

namespace perseus {

// Has the process's writing thread run `action`, in the order of the calls, and returns when that is done, so that what
// was written is there whatever happens next. When the thread is held up, returns after half a second, and at once as
// long as it stays held up; what is left then is waited for at exit(), 10 s at most. In a forked child, which has no
// such thread, the caller runs it.
void write_aside(std::function<void()> action);

}  // namespace perseus

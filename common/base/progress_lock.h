// What "with the progress lock held" means to clang's thread-safety analysis: code that annotates itself with
// PERSEUS_REQUIRES(progress_lock) runs in a pass of its Context's progress engine, or while a ProgressLock on it lives.
// Contexts do not share what the lock guards, so one name serves all of them.
#pragma once

#include "base/thread_annotations.h"

namespace perseus {

class PERSEUS_CAPABILITY("progress lock") ProgressCapability {};
inline constexpr ProgressCapability progress_lock;

}  // namespace perseus

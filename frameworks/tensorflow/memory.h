// How the process deals with memory that was freed.
#pragma once

namespace perseus::tensorflow {

// Has malloc keep what TensorFlow frees for the next step. For the whole process.
void keep_freed_memory();

}  // namespace perseus::tensorflow

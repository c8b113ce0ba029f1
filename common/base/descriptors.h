// Descriptors, of which a process may have only so many: how many it needs, and what to say when none is left.
// Thread-safe.
#pragma once

#include <cstddef>
#include <string>

namespace perseus {

// What an error number means, as messages say it. When it is a shortage of descriptors, open ones or such as are on
// their way between processes: whose limit it is, how high it is and how to raise it.
std::string error_text(int error);

// Raises the soft limit so that `more` descriptors can be opened beside those that are open, as far as the hard limit
// lets it. Returns "" or what is missing.
std::string make_room_for_descriptors(size_t more);

// Opens /dev/null in place of those of standard input, output and error that are closed. One of ours would otherwise
// get its number, and whatever the process prints would go into it.
void occupy_standard_descriptors();

}  // namespace perseus

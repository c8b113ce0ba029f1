// What tests say to the stand-in for libpmix.so.2.
#pragma once

#include <string>

// What rank 0 has put under the key "store".
void standin_pmix_tell(std::string text);

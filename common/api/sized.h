// Structs that cross the C ABI, whose callers may have been compiled with an older or a newer perseus.h. Pure
// functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/error.h"

namespace perseus {

// Larger than any struct will be: what claims to be was never initialised.
constexpr size_t kLargestStruct = 4096;

// Throws Error(kInvalidArgument) for a size that no version of the struct `name` can have.
inline void check_struct_size(size_t size, const char* name) {
  if (size > sizeof(size_t) && size <= kLargestStruct) return;
  fail(ErrorKind::kInvalidArgument, std::string("[api] ") + name + ".struct_size is " + std::to_string(size) +
                                        ": zero-initialise the struct and set it to sizeof(" + name + ")");
}

// What a caller has filled in. Fields that an older caller does not have are 0; those of a newer caller that are not
// known here must be. The caller's struct must outlive this.
template <typename Struct>
class Given {
 public:
  Given(const Struct* from, const char* name) : struct_(from) {
    const size_t size = from->struct_size;
    if (size == sizeof(Struct)) return;
    check_struct_size(size, name);
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    for (size_t i = sizeof(Struct); i < size; ++i)
      if (bytes[i] != 0)
        fail(ErrorKind::kInvalidArgument, std::string("[api] the caller sets a field of ") + name +
                                              " that this library does not have: it was compiled for a newer " +
                                              "Perseus than the installed " PERSEUS_VERSION);
    copy_ = {};
    std::memcpy(&copy_, from, std::min(size, sizeof(Struct)));
    struct_ = &copy_;
  }
  Given(const Given&) = delete;
  Given& operator=(const Given&) = delete;

  const Struct& operator*() const { return *struct_; }
  const Struct* operator->() const { return struct_; }

 private:
  Struct copy_;  // of a caller of another version; untouched, and not paid for, otherwise
  const Struct* struct_;
};

// Fills in the caller's struct as far as it goes; what only a newer caller has stays as it is.
template <typename Struct>
void give(const Struct& from, Struct* to, const char* name) {
  check_struct_size(to->struct_size, name);
  std::memcpy(reinterpret_cast<unsigned char*>(to) + sizeof(size_t),
              reinterpret_cast<const unsigned char*>(&from) + sizeof(size_t),
              std::min(to->struct_size, sizeof(Struct)) - sizeof(size_t));
}

}  // namespace perseus

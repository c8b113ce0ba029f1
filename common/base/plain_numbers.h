// Numbers in files and settings, which have a decimal point in every language.
#pragma once

#include <locale.h>

namespace perseus {

// While it lives, functions of C on this thread read and write numbers as the "C" locale does, whatever the script has
// chosen with setlocale().
class PlainNumbers {
 public:
  PlainNumbers() : before_(::uselocale(plain())) {}
  ~PlainNumbers() { ::uselocale(before_); }
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;

 private:
  static locale_t plain() {
    static const locale_t made = ::newlocale(LC_ALL_MASK, "C", nullptr);  // of the C library itself
    return made;
  }

  const locale_t before_;
};

}  // namespace perseus

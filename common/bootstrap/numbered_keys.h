// Keys that differ in the decimal number at their end, such as those of all ranks, and which of them are still to come.
// Not thread-safe.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace perseus {

class NumberedKeys {
 public:
  NumberedKeys() = default;
  // prefix + "7" for the number 7. Throws Error(kInvalidArgument) unless the numbers ascend() from 0 or more.
  NumberedKeys(std::string prefix, std::vector<int> numbers)
      : prefix_(std::move(prefix)), numbers_(std::move(numbers)), came_(numbers_.size()), left_(numbers_.size()) {
    if (!ascend(numbers_))
      fail(ErrorKind::kInvalidArgument,
           "[rendezvous] the numbers of keys '" + prefix_ + "…' must ascend from 0 or more");
  }

  static bool ascend(const std::vector<int>& numbers) {
    const auto not_above = [](int a, int b) { return a >= b; };
    return (numbers.empty() || numbers.front() >= 0) &&
           std::adjacent_find(numbers.begin(), numbers.end(), not_above) == numbers.end();
  }

  std::string key(int number) const { return prefix_ + std::to_string(number); }

  bool all_came() const { return left_ == 0; }

  // The lowest of those still to come, of which there must be one.
  std::string first_missing() const {
    const auto place = std::find(came_.begin(), came_.end(), false) - came_.begin();
    return key(numbers_[static_cast<size_t>(place)]);
  }

  std::vector<int> missing() const {
    std::vector<int> numbers;
    for (size_t i = 0; i < numbers_.size(); ++i)
      if (!came_[i]) numbers.push_back(numbers_[i]);
    return numbers;
  }

  // The number at the end of `key` when this is one of the keys still to come.
  std::optional<int> number_of(const std::string& key) const {
    if (all_came() || key.compare(0, prefix_.size(), prefix_) != 0) return std::nullopt;
    const char *begin = key.data() + prefix_.size(), *end = key.data() + key.size();
    unsigned number = 0;
    const auto [rest, problem] = std::from_chars(begin, end, number);
    const bool padded = *begin == '0' && end - begin > 1;
    if (problem != std::errc() || rest != end || padded || number > kMost) return std::nullopt;
    if (!is_missing(static_cast<int>(number))) return std::nullopt;
    return static_cast<int>(number);
  }

  bool is_missing(int number) const {
    const auto place = find(number);
    return place != numbers_.end() && !came_[static_cast<size_t>(place - numbers_.begin())];
  }

  // `number` must be missing.
  void mark(int number) {
    came_[static_cast<size_t>(find(number) - numbers_.begin())] = true;
    --left_;
  }

 private:
  static constexpr unsigned kMost = 0x7fffffff;

  std::vector<int>::const_iterator find(int number) const {
    const auto place = std::lower_bound(numbers_.begin(), numbers_.end(), number);
    return place != numbers_.end() && *place == number ? place : numbers_.end();
  }

  std::string prefix_;
  std::vector<int> numbers_;
  std::vector<bool> came_;
  size_t left_ = 0;
};

}  // namespace perseus

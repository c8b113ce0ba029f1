// JSON as tests read it: a value and a strict parser that fails the test on anything malformed.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace perseus_test {

struct Json {
  enum class Type { kNothing, kText, kNumber, kArray, kObject };
  Type type = Type::kNothing;
  std::string text;
  double number = 0;
  std::vector<Json> array;
  std::map<std::string, Json> object;

  bool has(const std::string& key) const { return object.count(key) != 0; }
  // A value without type where there is none.
  const Json& operator[](const std::string& key) const {
    static const Json kNone;
    const auto found = object.find(key);
    return found == object.end() ? kNone : found->second;
  }
};

// Objects, arrays, texts without \u but for control characters, and numbers: what the core writes.
class JsonParser {
 public:
  explicit JsonParser(const std::string& source) : source_(source) {}

  // False on malformed input; `value` is then of no use.
  bool parse(Json* value) {
    const bool ok = read(value);
    skip();
    return ok && at_ == source_.size();
  }

 private:
  void skip() {
    while (at_ < source_.size() && std::string(" \n\r\t").find(source_[at_]) != std::string::npos) ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= source_.size() || source_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool read_text(std::string* text) {
    if (!take('"')) return false;
    while (at_ < source_.size() && source_[at_] != '"') {
      if (static_cast<unsigned char>(source_[at_]) < 0x20) return false;
      if (source_[at_] == '\\') {
        if (++at_ >= source_.size()) return false;
        if (source_[at_] == 'u') {
          *text += static_cast<char>(std::strtol(source_.substr(at_ + 1, 4).c_str(), nullptr, 16));
          at_ += 5;
          continue;
        }
      }
      *text += source_[at_++];
    }
    return take('"');
  }
  bool read_number(double* number) {
    const size_t end = source_.find_first_not_of("+-.0123456789eE", at_);
    const std::string digits = source_.substr(at_, end - at_);
    char* rest = nullptr;
    *number = std::strtod(digits.c_str(), &rest);
    at_ += digits.size();
    return !digits.empty() && *rest == '\0';
  }
  bool read(Json* value) {
    skip();
    if (at_ >= source_.size()) return false;
    if (source_[at_] == '"') {
      value->type = Json::Type::kText;
      return read_text(&value->text);
    }
    if (take('[')) {
      value->type = Json::Type::kArray;
      if (take(']')) return true;
      do {
        value->array.emplace_back();
        if (!read(&value->array.back())) return false;
      } while (take(','));
      return take(']');
    }
    if (take('{')) {
      value->type = Json::Type::kObject;
      if (take('}')) return true;
      do {
        std::string key;
        if (!read_text(&key) || !take(':') || !read(&value->object[key])) return false;
      } while (take(','));
      return take('}');
    }
    value->type = Json::Type::kNumber;
    return read_number(&value->number);
  }

  const std::string& source_;
  size_t at_ = 0;
};

}  // namespace perseus_test

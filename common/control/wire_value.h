// Values in announcements: little-endian and self-delimiting. Every type is written, read and named here, once; a
// struct is its fields one after the other. Pure functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/fields.h"
#include "request/request.h"

namespace perseus {

// An enumeration travels as one byte below this number of choices.
template <typename Enum>
inline constexpr int kChoices = 0;
template <>
inline constexpr int kChoices<Kind> = kNegotiatedKinds;
template <>
inline constexpr int kChoices<DType> = kDTypeCount;
template <>
inline constexpr int kChoices<ReduceOp> = static_cast<int>(ReduceOp::kProduct) + 1;
template <>
inline constexpr int kChoices<CodecKind> = kCodecKinds;
template <>
inline constexpr int kChoices<Flush> = kFlushes;

// Takes values off a blob that may hold anything.
class WireReader {
 public:
  explicit WireReader(const std::string& blob) : at_(blob.data()), end_(at_ + blob.size()) {}
  bool at_end() const { return at_ == end_; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  const char* take_bytes(size_t bytes) {
    if (bytes > left()) fail(ErrorKind::kIo, "[negotiation] truncated announcement");
    at_ += bytes;
    return at_ - bytes;
  }

 private:
  const char* at_;
  const char* end_;
};

// kName: what docs/protocol.md calls the type ("" for a struct, which has a line of its own there); kLeast: no value
// takes fewer bytes.
template <typename T, typename = void>
struct WireValue;

template <typename T>
struct WireValue<T, std::enable_if_t<std::is_arithmetic_v<T> && !std::is_same_v<T, bool>>> {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  static constexpr const char* kName = std::is_floating_point_v<T> ? (sizeof(T) == 8 ? "f64" : "f32")
                                       : std::is_signed_v<T>       ? (sizeof(T) == 8 ? "i64" : "i32")
                                                                   : (sizeof(T) == 8 ? "u64" : "u32");
  static constexpr size_t kLeast = sizeof(T);
  static void put(const T& value, std::string* blob) {
    blob->append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static void take(WireReader* from, T* value) { std::memcpy(value, from->take_bytes(sizeof *value), sizeof *value); }
};

// Enumerations and bool.
template <typename T>
struct WireValue<T, std::enable_if_t<std::is_enum_v<T> || std::is_same_v<T, bool>>> {
  static constexpr const char* kName = "u8";
  static constexpr size_t kLeast = 1;
  static constexpr int kCount = std::is_same_v<T, bool> ? 2 : kChoices<T>;
  static_assert(kCount > 0, "kChoices says how many values an enumeration has");
  static void put(T value, std::string* blob) { blob->push_back(static_cast<char>(value)); }
  static void take(WireReader* from, T* value) {
    const uint8_t byte = static_cast<uint8_t>(*from->take_bytes(1));
    if (byte >= kCount)
      fail(ErrorKind::kIo, "[negotiation] malformed announcement: a choice is " + std::to_string(byte) +
                               ", expected less than " + std::to_string(kCount));
    *value = static_cast<T>(byte);
  }
};

// A length, then the elements.
template <typename T>
struct WireValue<std::vector<T>> {
  static inline const std::string kName = WireValue<T>::kName + std::string("*");
  static constexpr size_t kLeast = sizeof(uint32_t);
  static void put(const std::vector<T>& values, std::string* blob) {
    WireValue<uint32_t>::put(static_cast<uint32_t>(values.size()), blob);
    for (const T& value : values) WireValue<T>::put(value, blob);
  }
  static void take(WireReader* from, std::vector<T>* values) {
    uint32_t count = 0;
    WireValue<uint32_t>::take(from, &count);
    if (count > from->left() / WireValue<T>::kLeast)  // before memory is taken for them
      fail(ErrorKind::kIo, "[negotiation] announcement longer than its message");
    values->resize(count);
    for (T& value : *values) WireValue<T>::take(from, &value);
  }
};

template <>
struct WireValue<std::string> {
  static constexpr const char* kName = "text";
  static constexpr size_t kLeast = sizeof(uint32_t);
  static void put(const std::string& value, std::string* blob) {
    WireValue<uint32_t>::put(static_cast<uint32_t>(value.size()), blob);
    blob->append(value);
  }
  static void take(WireReader* from, std::string* value) {
    uint32_t size = 0;
    WireValue<uint32_t>::take(from, &size);
    value->assign(from->take_bytes(size), size);
  }
};

template <typename Struct>
struct WireValue<Struct, std::enable_if_t<HasFields<Struct>::value>> {
  static constexpr const char* kName = "";
  static constexpr size_t kLeast = std::tuple_size_v<decltype(Struct::fields())>;  // of one byte or more each
  static void put(const Struct& value, std::string* blob) {
    for_each_field<Struct>([&](const auto& field) { wire_of(field.member).put(value.*field.member, blob); });
  }
  static void take(WireReader* from, Struct* value) {
    for_each_field<Struct>([&](const auto& field) { wire_of(field.member).take(from, &(value->*field.member)); });
  }

 private:
  template <typename Owner, typename Value>
  static constexpr WireValue<Value> wire_of(Value Owner::*) {
    return {};
  }
};

}  // namespace perseus

// The fields of a struct, listed once in its static fields(): comparing, writing, reading and printing follow from that
// list. Pure functions.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace perseus {

template <typename Struct, typename Value>
struct Field {
  const char* name;
  Value Struct::* member;
};

template <typename Struct, typename Value>
constexpr Field<Struct, Value> field(const char* name, Value Struct::* member) {
  return {name, member};
}

// Does a type list its fields?
template <typename T, typename = void>
struct HasFields : std::false_type {};
template <typename T>
struct HasFields<T, std::void_t<decltype(T::fields())>> : std::true_type {};

// Calls visit(field) for the fields of a struct, in the order of its list.
template <typename Struct, typename Visit>
constexpr void for_each_field(Visit&& visit) {
  std::apply([&](const auto&... each) { (visit(each), ...); }, Struct::fields());
}

// Does same(field) hold for every field? Stops at the first for which it does not. Inlined, since every submission
// compares requests.
template <typename Struct, typename Same>
[[gnu::always_inline]] constexpr bool all_fields(Same&& same) {
  return std::apply([&](const auto&... each) { return (same(each) && ...); }, Struct::fields());
}

template <typename Struct>
[[gnu::always_inline]] inline bool same_fields(const Struct& a, const Struct& b) {
  return all_fields<Struct>([&](const auto& each) { return a.*each.member == b.*each.member; });
}

// Stands for a value of any type, where a struct's members are counted.
struct AnyValue {
  template <typename T>
  operator T() const;  // never defined
};

template <typename Struct, typename Numbers, typename = void>
struct HasMembers : std::false_type {};
template <typename Struct, size_t... kNumbers>
struct HasMembers<Struct, std::index_sequence<kNumbers...>,
                  std::void_t<decltype(Struct{((void)kNumbers, AnyValue{})...})>> : std::true_type {};

// Does the list of a plain struct leave no member out? For static_assert.
template <typename Struct>
constexpr bool lists_every_member() {
  constexpr size_t kListed = std::tuple_size_v<decltype(Struct::fields())>;
  return HasMembers<Struct, std::make_index_sequence<kListed>>::value &&
         !HasMembers<Struct, std::make_index_sequence<kListed + 1>>::value;
}

}  // namespace perseus

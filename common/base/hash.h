// FNV-1a (Fowler, Noll and Vo), 64 bits: the same on every machine and in every run.
#pragma once

#include <cstdint>
#include <string>

namespace perseus {

constexpr uint64_t kFnvBasis = 14695981039346656037U, kFnvPrime = 1099511628211U;

// `hash`: of what comes before.
inline uint64_t fnv1a(const std::string& text, uint64_t hash = kFnvBasis) {
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * kFnvPrime;
  return hash;
}

}  // namespace perseus

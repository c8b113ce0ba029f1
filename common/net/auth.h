// SHA-256, HMAC and random secrets: what store requests and data connections use to prove knowledge of the job's
// secret. Thread-safe: pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <string>

namespace perseus {

using Digest = std::array<unsigned char, 32>;

Digest sha256(const void* data, size_t size);                               // FIPS 180-4
Digest hmac_sha256(const std::string& key, const void* data, size_t size);  // RFC 2104
// Same run time wherever the first difference is.
bool digests_equal(const Digest& a, const Digest& b);
std::string bytes_of(const Digest& digest);
// n bytes from the kernel's generator. Throws Error(kIo).
std::string random_bytes(size_t n);

// The HMAC under `secret` of `fields`, each preceded by its length, so that no two lists of fields look the same. The
// first field says what is being proved by whom: a proof made for one purpose is worth nothing for another.
Digest prove(const std::string& secret, std::initializer_list<std::string> fields);
// Is `proof` (32 bytes as received) what prove() gives?
bool proof_holds(const std::string& proof, const std::string& secret, std::initializer_list<std::string> fields);

}  // namespace perseus

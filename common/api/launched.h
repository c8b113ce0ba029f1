// Worlds of processes that know nothing of each other but what launched them. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "api/context.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/identity.h"

namespace perseus {

// See perseus_context_create_launched.
std::unique_ptr<Context> create_launched(const std::string& job);
// See perseus_launched_store.
const Rendezvous& launched_rendezvous(const char* const* environment);
// See perseus_launched_identity_read.
Identity launched_identity(const char* const* environment);

}  // namespace perseus

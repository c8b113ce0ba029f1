// Worlds of processes that know nothing of each other but what launched them. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "api/context.h"
#include "bootstrap/bootstrap.h"

namespace perseus {

// See perseus_context_create_launched.
std::unique_ptr<Context> create_launched(const std::string& job);
// See perseus_launched_store.
const Rendezvous& launched_rendezvous();

}  // namespace perseus

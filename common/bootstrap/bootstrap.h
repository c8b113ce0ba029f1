// How the ranks of a job find their store without any help from outside the core: host, port and secret, through
// whatever launched them. perseus/run/bootstrap/rendezvous.py does the same for Python.
#pragma once

#include <memory>
#include <string>

#include "base/config.h"
#include "bootstrap/identity.h"
#include "bootstrap/store.h"

namespace perseus {

// Where this job's store listens, and what proves membership. Hold it as long as any rank may start again: in rank 0
// it keeps alive the server that others come to. Port 0: a world of one rank, which needs no store.
struct Rendezvous {
  std::string host;
  int port = 0;
  std::string secret;
  std::shared_ptr<StoreServer> server;
};

// Agrees with all ranks of the world on one store; rank 0 starts it unless the launcher did. Under mpirun a process can
// do this once, before it initialises MPI itself. Throws Error: kInvalidArgument for a setting that is wrong or
// missing, kTimeout when a rank stays away for HOROVOD_START_TIMEOUT, kIo where the launcher does not answer; one line
// each, with the remedy.
Rendezvous bootstrap(const Identity& identity, const Environment& environment, const Config& config);

// The first of the hosts that Slurm's compressed list names: 'a[01-03,7]-x,b' -> 'a01-x'.
std::string first_host(const std::string& nodelist);

}  // namespace perseus

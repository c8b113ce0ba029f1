// What the engine does for the world's tuner: tells the ranks' times, and writes down what was chosen and why.
#include <fstream>

#include "base/error.h"
#include "base/write_aside.h"
#include "engine/engine.h"

namespace perseus {

void Engine::begin_tuner_log() const {
  if (tuner_log_.empty()) return;
  std::ofstream file(tuner_log_, std::ios::trunc);
  if (!(file << tuner_log_header() << std::flush))
    fail(ErrorKind::kInvalidArgument, "[tuner] cannot write to HOROVOD_AUTOTUNE_LOG='" + tuner_log_ + "'");
}

void Engine::keep_tuning(ProcessSet* world) {
  Tuner& tuner = world->tuner();
  if (tuner_handle_ != 0 && HandleTable::is_done(*handles_.find(tuner_handle_))) {
    handles_.release(tuner_handle_);
    tuner_handle_ = 0;
  }
  if (tuner.has_times()) {
    Submission told;
    told.kind = Kind::kBarrier;
    told.name = Tuner::kName;
    told.transient = true;
    told.times = tuner.take_times();
    // A rank that has joined learns of it all the same.
    if (!world->negotiation().joined()) try {
        tuner_handle_ = submit(told);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kAborted) throw;  // the world is being shut down: nobody waits for this
      }
  }
  if (!tuner.has_decision()) return;
  const Tuner::Decision decision = tuner.take_decision();
  if (timeline_.on()) timeline_.tuned(decision.chosen.bucket_bytes, decision.chosen.streams, decision.why);
  if (world_.rank != 0) return;
  log_.write(LogLevel::kInfo, "[tuner] " + decision.why);
  if (tuner_log_.empty()) return;
  write_aside([log = log_, path = tuner_log_, lines = tuner_log_lines(decision)] {
    std::ofstream file(path, std::ios::app);
    if (!(file << lines << std::flush)) log.warning("[tuner] cannot write to '" + path + "'");
  });
}

}  // namespace perseus

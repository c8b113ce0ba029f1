// TensorFlow's statuses: their lifetime, and the status for each failure of the core.
#pragma once

#include <memory>
#include <string>

#include "perseus/perseus.h"
#include "tf_c_api.h"

namespace perseus::tensorflow {

class OwnedStatus {
 public:
  OwnedStatus() : status_(TF_NewStatus(), TF_DeleteStatus) {}
  OwnedStatus(int code, const std::string& message) : OwnedStatus() {
    TF_SetStatus(status_.get(), code, message.c_str());
  }

  TF_Status* get() const { return status_.get(); }
  bool ok() const { return TF_GetCode(status_.get()) == TF_OK; }

 private:
  std::unique_ptr<TF_Status, void (*)(TF_Status*)> status_;
};

// As Horovod has them. Not TF_ABORTED for a world that has ended: sessions would quietly start again.
inline int tf_code(perseus_code code) {
  switch (code) {
    case PERSEUS_INVALID_ARGUMENT:
    case PERSEUS_NAN:
      return TF_INVALID_ARGUMENT;
    case PERSEUS_MISMATCH:
      return TF_FAILED_PRECONDITION;
    default:
      return TF_UNKNOWN;
  }
}

}  // namespace perseus::tensorflow

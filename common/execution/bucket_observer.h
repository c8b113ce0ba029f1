// What execution tells of a bucket that has just finished, where anybody wants to know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/progress_lock.h"
#include "codec/codec.h"
#include "request/request.h"

namespace perseus {

class BucketObserver {
 public:
  struct Bucket {
    uint64_t number = 0;
    int stream = 0;
    size_t bytes = 0;
    int64_t begun_ns = 0;       // its turn on the stream
    int64_t first_byte_ns = 0;  // 0 = not seen, since nobody wanted to know then
    CodecKind codec = CodecKind::kNone;
    int64_t codec_ns = 0;  // spent on encoding and decoding
  };

  virtual ~BucketObserver() = default;
  // Does anybody want to know at present?
  virtual bool on() const PERSEUS_REQUIRES(progress_lock) = 0;
  // `ranks`: the group's members. `entries`: whose tensors the bucket held.
  virtual void bucket(const Bucket& bucket, const std::vector<int>& ranks, const std::vector<Entry*>& entries)
      PERSEUS_REQUIRES(progress_lock) = 0;
};

}  // namespace perseus

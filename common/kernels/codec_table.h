// A variant's entry for codecs, from all of its loops. Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/codec_loops.h"
#include "kernels/exponent_loops.h"
#include "kernels/integer_loops.h"
#include "kernels/select_loops.h"

namespace perseus::kernels {
namespace {

constexpr CodecKernels kCodecKernels{
    largest_magnitude_any, largest_finite_magnitude_any, add_to_residual_any, encode_halves_any,
    decode_halves_any,     encode_integers_any,          decode_integers_any, encode_exponents_any,
    decode_exponents_any,  count_at_least_any,           find_at_least_any,   add_at_any};

}  // namespace
}  // namespace perseus::kernels

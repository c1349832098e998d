// A few bits of each of many tensors, in hashes: where members hold the same, these are equal.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace torchft_ext {

// 8 bytes for each of a sequence of tensors and Nones, which depend on its dtype, its shape and the
// bits of at most 8 elements, at a place that the seed chooses. None has a hash of its own, and
// so has a tensor without memory of its own in the order of its elements (sparse, quantized,
// conjugated, a wrapper): its values are not in it. On the CPU nothing is copied. Of the tensors of
// devices a few are sampled at a time, others with another seed; the call waits for the device's
// current stream. With the GIL, which it releases. of_gradients: of their .grad instead. TypeError:
// something else is in the sequence.
std::string sampledBits(const pybind11::sequence& tensors, uint64_t seed, bool of_gradients);

}  // namespace torchft_ext

// Options(nan_check=True): what this rank puts into an operation is looked at before it is sent. A
// NaN there fails the generation, so that every rank is told which rank brought it into which
// operation.
//
// Host memory is looked at at issue, on the calling thread. Device memory is looked at in stream
// order, on the stream that the caller works on, without blocking the host: the answer is a byte of
// host memory, which has been written once the operation has begun.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "c10d/adapter/prepared.h"

namespace torchft_ext {

// What the operation reads of this rank's memory, as flat views of their dtypes; no owners. Only
// floating point and complex numbers; these as pairs of real ones.
std::vector<at::Tensor> contributionsOf(const Prepared& prepared);

// Host memory.
bool holdsNan(const std::vector<at::Tensor>& contributions);

// Enqueues on the current stream; true, some time after the stream has got there, where one of them
// holds a NaN. Contributions: at least one, of one device.
std::function<bool()> enqueueNanCheck(const std::vector<at::Tensor>& contributions);

// How the failure came about, for the error.
std::string nanFound(OpKind kind);

}  // namespace torchft_ext

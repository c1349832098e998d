// A failure on the wire: what happened and who caused it, not where this rank was. Bounded texts.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "torchft_ext/failure.h"

namespace torchft_ext {

std::string encodeFailure(const Failure& failure);  // the payload of a kFailed frame
// nullopt: malformed, an unknown kind, or a rank outside the generation.
std::optional<Failure> decodeFailure(std::string_view payload, int size);

}  // namespace torchft_ext

// A request as the engine's operation. Pure; any thread.
#pragma once

#include <string>
#include <variant>

#include "child/arena.h"
#include "child/protocol.h"
#include "comm/operation.h"

namespace torchft_ext::child {

// Or what is wrong with its buffers, for this rank of so many. Throws ProtocolError where a span is
// outside the arena: no parent of this version asks for that.
std::variant<Operation, std::string> operationOf(const Issue& issue, const Arena& arena, int rank,
                                                 int size);

}  // namespace torchft_ext::child

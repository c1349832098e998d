// A request as the engine's operation. Pure; any thread.
#pragma once

#include <string>
#include <variant>

#include "child/protocol.h"
#include "child/served_engine.h"
#include "comm/operation.h"

namespace torchft_ext::child {

// Or what is wrong with its buffers, for this rank of so many. Throws ProtocolError where a span is
// of memory that nobody has lent: no parent of this version asks for that.
std::variant<Operation, std::string> operationOf(const Issue& issue, const ServedEngine& memory,
                                                 int rank, int size);

}  // namespace torchft_ext::child

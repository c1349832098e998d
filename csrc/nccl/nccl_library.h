// The NCCL of this process, found at run time: the one that torch loaded, or another one that
// TORCHFT_EXT_NCCL_LIB names. No nccl.h: entry points are looked up by name, and each optional one
// counts as there only if the library's version has it too.
#pragma once

#include <memory>
#include <string>
#include <variant>

#include "nccl/nccl_api.h"

namespace torchft_ext {

// The library, kept loaded until the process ends; or why there is none (where it was looked for).
// Any thread; may load a shared library.
std::variant<std::shared_ptr<NcclApi>, std::string> loadNcclLibrary();

// The variable of the environment that would turn the communicators into something that cannot be
// aborted, with what to do about it. Empty: none is set.
std::string refusedNcclEnvironment();
// The same for what would free a blocking communicator while a call waits in it, or let calls wait
// for other communicators' ranks.
std::string refusedForBlockingCalls();

}  // namespace torchft_ext

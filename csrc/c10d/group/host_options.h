// The CPU engine's options: a group's own, else the environment's, else the engine's defaults.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/group/options.h"
#include "host/host_engine.h"

namespace torchft_ext {

// Blocks and throws as chooseAddress(). ValueError for bad ones.
HostEngineOptions hostOptionsOf(const FtOptions& options,
                                const c10::intrusive_ptr<c10d::Store>& store);

// The same for an engine in another process, as options that leave nothing to choose: the interface
// is the numeric address, the range is "" for any port.
FtOptions networkOptionsOf(const FtOptions& options, const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace torchft_ext

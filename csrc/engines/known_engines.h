// Which engines there are: the one place that names them all. A new engine is registered in
// known_engines.cpp.
#pragma once

#include "device/engine_registry.h"

namespace torchft_ext {

// This process's, with the engines of this library registered; in a forked child made anew. Any
// thread, never blocks. Never destroyed.
EngineRegistry& engineRegistry();

}  // namespace torchft_ext

// The programs whose engine is for devices: child/program.h says how they are started. Descriptor 3
// is all they have.
#pragma once

#include "child/program.h"

namespace torchft_ext::device_child {

// main() of one; engine: its name in the registry.
int run(const char* name, const char* engine, int argc, char** argv);

}  // namespace torchft_ext::device_child

// This host's name as the kernel has it, for records and messages. Never throws on an odd name.
#pragma once

#include <string>

namespace torchft_ext {

std::string hostName();

}  // namespace torchft_ext

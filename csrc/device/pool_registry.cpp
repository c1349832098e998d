#include "device/pool_registry.h"

#include <sstream>

namespace torchft_ext {

std::string describe(const PoolId& id) {
  return "(" + std::to_string(id.first) + ", " + std::to_string(id.second) + ")";
}

std::string describe(const MemorySegment& segment) {
  std::ostringstream text;
  text << segment.bytes << " bytes at 0x" << std::hex << segment.address << " of pool "
       << describe(segment.pool);
  return text.str();
}

}  // namespace torchft_ext

#include "device_child/device_program.h"

#include <memory>

#include "device_child/device_served.h"

namespace torchft_ext::device_child {

int run(const char* name, const char* engine, int argc, char** argv) {
  const auto served = [engine](pid_t parent) {
    return std::make_unique<DeviceServed>(engine, child::kSocket, parent);
  };
  return child::run({name, child::kSocket, served}, argc, argv);
}

}  // namespace torchft_ext::device_child

#include "device/devices_end.h"

#include <atomic>
#include <cstdlib>

#include "base/log.h"

namespace torchft_ext {
namespace {

std::atomic<bool> ended{false};  // by exit()

}  // namespace

void noteDevicesUsed() {
  static const bool noted = std::atexit([] { ended.store(true); }) == 0;
  if (!noted) log(LogLevel::kWarning, "no room for an exit handler: exit() may end in terminate()");
}

bool devicesEnded() {
  return ended.load();
}

}  // namespace torchft_ext

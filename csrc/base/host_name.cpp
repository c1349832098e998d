#include "base/host_name.h"

#include <unistd.h>

#include <array>

namespace torchft_ext {

std::string hostName() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown-host";
  return name.data();
}

}  // namespace torchft_ext

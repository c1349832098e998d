#include "c10d/group/engine_ipc.h"

#include <c10/util/Exception.h>

#include <utility>
#include <variant>

#include "engines/known_engines.h"

namespace torchft_ext {

std::shared_ptr<DeviceIpc> deviceIpc() {
  const auto kind = engineRegistry().find("nccl");
  auto found = kind && kind->ipc != nullptr ? kind->ipc() : NotHere{"it cannot lend memory"};
  const auto* not_here = std::get_if<NotHere>(&found);
  TORCH_CHECK_NOT_IMPLEMENTED(not_here == nullptr, "NCCL in a child process needs NCCL here too: ",
                              not_here == nullptr ? "" : not_here->why,
                              "; use ProcessGroupBabyHost for CPU tensors");
  return std::get<std::shared_ptr<DeviceIpc>>(std::move(found));
}

}  // namespace torchft_ext

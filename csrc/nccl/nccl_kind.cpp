#include "nccl/nccl_kind.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "nccl/memory_registry.h"
#include "nccl/nccl_engine.h"
#include "nccl/nccl_library.h"
#include "nccl/nccl_platform.h"

namespace torchft_ext {
namespace {

constexpr const char* kBlocking = "TORCHFT_EXT_NCCL_BLOCKING";

std::optional<bool> askedForBlockingCalls() {
  const char* value = std::getenv(kBlocking);  // nothing here calls setenv
  if (value == nullptr || *value == '\0') return std::nullopt;
  const std::string text(value);
  TORCH_CHECK_VALUE(text == "0" || text == "1", kBlocking, ": expected '0' or '1', found '", text,
                    "'");
  return text == "1";
}

// What the environment asks for. Else blocking communicators, which spare a thread of NCCL's for
// each operation (docs/decisions.md), where nothing speaks against them.
bool blockingCalls(std::optional<bool> asked, const NcclApi& nccl) {
  if (asked == false) return false;
  const std::string refused = refusedForBlockingCalls();
  TORCH_CHECK_VALUE(!asked || refused.empty(), kBlocking, "=1: ", refused);
  if (asked) return true;
  return refused.empty() && knowsBlockingAborts(nccl);
}

NcclEngineOptions optionsOf(const EngineRequest& request, const NcclPlatform& platform,
                            std::optional<bool> asked_for_blocking) {
  NcclEngineOptions options;
  if (request.bound_device && request.bound_device->type() == platform.device_type)
    options.bound_device = request.bound_device;
  options.high_priority = request.high_priority;
  options.blocking_calls = blockingCalls(asked_for_blocking, *platform.nccl);
  options.memory = std::dynamic_pointer_cast<MemoryRegistry>(request.memory);
  if (!options.memory) options.memory = std::make_shared<MemoryRegistry>();
  return options;
}

EngineKind::Outcome make(const EngineRequest& request) {
  const std::optional<bool> asked_for_blocking = askedForBlockingCalls();
  auto found = ncclPlatform();
  if (auto* why_none = std::get_if<std::string>(&found)) return NotHere{std::move(*why_none)};
  auto host = request.host();
  if (auto* failure = std::get_if<Failure>(&host)) return std::move(*failure);
  auto platform = std::get<std::shared_ptr<const NcclPlatform>>(std::move(found));
  const NcclEngineOptions options = optionsOf(request, *platform, asked_for_blocking);
  MadeEngine made;
  made.engine =
      makeNcclEngine(platform, std::get<std::shared_ptr<Engine>>(std::move(host)), options);
  made.platform = std::move(platform);
  made.memory = options.memory;
  return made;
}

std::variant<std::shared_ptr<DeviceIpc>, NotHere> ipc() {
  auto found = ncclPlatform();
  if (auto* why_none = std::get_if<std::string>(&found)) return NotHere{std::move(*why_none)};
  auto lent = std::get<std::shared_ptr<const NcclPlatform>>(found)->cuda->ipc();
  if (auto* why_none = std::get_if<std::string>(&lent)) return NotHere{std::move(*why_none)};
  return std::get<std::shared_ptr<DeviceIpc>>(std::move(lent));
}

}  // namespace

EngineKind ncclEngineKind() {
  EngineKind kind;
  kind.name = "nccl";
  kind.library = "NCCL";
  kind.for_devices = true;
  kind.make = make;
  kind.stop = &stopNcclEngines;
  kind.ipc = &ipc;
  return kind;
}

}  // namespace torchft_ext

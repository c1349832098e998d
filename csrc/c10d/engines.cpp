#include "c10d/engines.h"

#include <utility>
#include <variant>

#include "c10d/comm_error.h"
#include "c10d/environment.h"
#include "c10d/interface_choice.h"
#include "host/host_engine.h"
#include "host/process.h"
#include "nccl/memory_registry.h"
#include "nccl/nccl_engine.h"
#include "nccl/nccl_library.h"

namespace torchft_ext {
namespace {

HostEngineOptions hostOptions(const FtOptions& options,
                              const c10::intrusive_ptr<c10d::Store>& store) {
  const Environment environment = readEnvironment();
  HostEngineOptions host;
  host.bind_address = chooseAddress(options, environment, store);
  if (options.port_range) {
    host.ports = parsePortRange("Options.port_range", *options.port_range);
  } else if (environment.ports) {
    host.ports = *environment.ports;
  }
  host.local_sockets =
      options.local_sockets.value_or(environment.local_sockets.value_or(host.local_sockets));
  if (options.heartbeat) {
    checkHeartbeat("Options.heartbeat", *options.heartbeat);
    host.heartbeat_limit = *options.heartbeat;
  } else if (environment.heartbeat) {
    host.heartbeat_limit = *environment.heartbeat;
  }
  return host;
}

// What the environment asks for. Else blocking communicators, which spare a thread of NCCL's for
// each operation (docs/decisions.md), where nothing speaks against them.
bool blockingCalls(std::optional<bool> asked, const NcclApi& nccl) {
  if (asked == false) return false;
  const std::string refused = refusedForBlockingCalls();
  TORCH_CHECK_VALUE(!asked || refused.empty(), "TORCHFT_EXT_NCCL_BLOCKING=1: ", refused);
  if (asked) return true;
  return refused.empty() && knowsBlockingAborts(nccl);
}

}  // namespace

EngineChoice makeEngine(const std::string& name, const FtOptions& options,
                        const c10::intrusive_ptr<c10d::Store>& store,
                        const std::optional<c10::Device>& bound_device) {
  auto made = engineOrFailure(name, options, store, bound_device);
  if (auto* failure = std::get_if<Failure>(&made))
    throwFailure(std::make_shared<Failure>(std::move(*failure)));
  return std::get<EngineChoice>(std::move(made));
}

std::variant<EngineChoice, Failure> engineOrFailure(
    const std::string& name, const FtOptions& options, const c10::intrusive_ptr<c10d::Store>& store,
    const std::optional<c10::Device>& bound_device) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      name != "gloo", "torchft_ext has no gloo engine yet: use 'ft:host', its own CPU engine");
  TORCH_CHECK_VALUE(name == "ft" || name == "host" || name == "nccl",
                    "engine: expected 'ft', 'host', 'nccl' or 'gloo', found '", name, "'");
  if (name == "host") {
    auto made = hostEngine(hostOptions(options, store));
    if (auto* failure = std::get_if<Failure>(&made)) return std::move(*failure);
    return EngineChoice{std::get<std::shared_ptr<Engine>>(std::move(made)),
                        Devices(true, nullptr, "use the backend 'ft', which serves both")};
  }
  const auto found = ncclPlatform();
  const auto* why_none = std::get_if<std::string>(&found);
  TORCH_CHECK_NOT_IMPLEMENTED(name == "ft" || !why_none,
                              "the backend 'ft:nccl' needs NCCL: ", why_none ? *why_none : "",
                              "; use 'ft:host' for CPU tensors");
  auto made = hostEngine(hostOptions(options, store));
  if (auto* failure = std::get_if<Failure>(&made)) return std::move(*failure);
  auto host = std::get<std::shared_ptr<Engine>>(std::move(made));
  if (why_none) return EngineChoice{std::move(host), Devices(true, nullptr, *why_none)};
  const auto& platform = std::get<std::shared_ptr<const NcclPlatform>>(found);
  NcclEngineOptions nccl;
  if (bound_device && bound_device->type() == platform->device_type)
    nccl.bound_device = bound_device;
  nccl.high_priority = options.high_priority_stream;
  nccl.memory = std::make_shared<MemoryRegistry>();
  const Environment environment = readEnvironment();
  nccl.blocking_calls = blockingCalls(environment.nccl_blocking, *platform->nccl);
  addExitStep(&stopNcclEngines);
  auto engine = makeNcclEngine(platform, std::move(host), nccl);
  return EngineChoice{std::move(engine), Devices(name == "ft", platform, ""), nccl.memory};
}

}  // namespace torchft_ext

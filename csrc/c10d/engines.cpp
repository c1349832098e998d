#include "c10d/engines.h"

#include <variant>

#include "c10d/comm_error.h"
#include "c10d/environment.h"
#include "c10d/interface_choice.h"
#include "host/host_engine.h"

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
  if (options.heartbeat) {
    TORCH_CHECK_VALUE(options.heartbeat->count() >= 0,
                      "Options.heartbeat: expected zero (off) or a positive time, found ",
                      options.heartbeat->count(), " ms");
    host.heartbeat_limit = *options.heartbeat;
  } else if (environment.heartbeat) {
    host.heartbeat_limit = *environment.heartbeat;
  }
  return host;
}

}  // namespace

std::shared_ptr<Engine> makeEngine(const std::string& name, const FtOptions& options,
                                   const c10::intrusive_ptr<c10d::Store>& store) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      name != "nccl",
      "torchft_ext has no NCCL engine yet: use 'ft:host' for CPU tensors, or "
      "'cpu:ft_host,cuda:nccl' for both, where NCCL is torch's own");
  TORCH_CHECK_NOT_IMPLEMENTED(
      name != "gloo", "torchft_ext has no gloo engine yet: use 'ft:host', its own CPU engine");
  TORCH_CHECK_VALUE(name == "host", "engine: expected 'host', 'nccl' or 'gloo', found '", name,
                    "'");
  auto made = hostEngine(hostOptions(options, store));
  if (auto* failure = std::get_if<Failure>(&made))
    throwFailure(std::make_shared<Failure>(std::move(*failure)));
  return std::get<std::shared_ptr<Engine>>(std::move(made));
}

}  // namespace torchft_ext

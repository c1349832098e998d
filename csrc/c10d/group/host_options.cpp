#include "c10d/group/host_options.h"

#include <c10/util/Exception.h>

#include "c10d/group/environment.h"
#include "c10d/group/interface_choice.h"
#include "host/shared_environment.h"

namespace torchft_ext {

HostEngineOptions hostOptionsOf(const FtOptions& options,
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
  const std::string problem = useSharedEnvironment(&host);
  TORCH_CHECK_VALUE(problem.empty(), problem);
  if (options.heartbeat) {
    checkHeartbeat("Options.heartbeat", *options.heartbeat);
    host.heartbeat_limit = *options.heartbeat;
  } else if (environment.heartbeat) {
    host.heartbeat_limit = *environment.heartbeat;
  }
  return host;
}

FtOptions networkOptionsOf(const FtOptions& options, const c10::intrusive_ptr<c10d::Store>& store) {
  const HostEngineOptions host = hostOptionsOf(options, store);
  FtOptions chosen(options);
  chosen.interface = host.bind_address.ip();
  const auto [first, last] = host.ports;
  chosen.port_range = first == 0 ? "" : std::to_string(first) + "-" + std::to_string(last);
  chosen.local_sockets = host.local_sockets;
  chosen.heartbeat = std::chrono::duration_cast<std::chrono::milliseconds>(host.heartbeat_limit);
  return chosen;
}

}  // namespace torchft_ext

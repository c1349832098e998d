#include "engines/known_engines.h"

#include <memory>
#include <utility>
#include <variant>

#include "base/fork.h"
#include "nccl/nccl_kind.h"
#include "nccl/nccl_platform.h"
#include "staged/staged_engine.h"

namespace torchft_ext {
namespace {

// For device tensors too, where this process has a device.
MadeEngine staged(MadeEngine host) {
  auto found = devicePlatform();
  if (auto* why_none = std::get_if<std::string>(&found)) {
    host.why_not_staged = std::move(*why_none);
    return host;
  }
  host.staged = std::get<std::shared_ptr<const DevicePlatform>>(std::move(found));
  host.engine = makeStagedEngine(std::move(host.engine), host.staged);
  return host;
}

EngineKind hostEngineKind() {
  EngineKind kind;
  kind.name = "host";
  kind.make = [](const EngineRequest& request) -> EngineKind::Outcome {
    auto made = request.host();
    if (auto* failure = std::get_if<Failure>(&made)) return std::move(*failure);
    MadeEngine host{std::get<std::shared_ptr<Engine>>(std::move(made))};
    return request.staged ? staged(std::move(host)) : std::move(host);
  };
  kind.stop = &stopStagedEngines;
  return kind;
}

// Called, not left to static initialisers: those run in no order that anybody has chosen, and a
// linker may leave out the object file of one that nobody calls.
struct KnownEngines {
  KnownEngines() {
    registry.registerEngine(hostEngineKind());
    registry.registerEngine(ncclEngineKind());
  }
  EngineRegistry registry;
};
PerProcess<KnownEngines> known;

}  // namespace

EngineRegistry& engineRegistry() {
  return known.get().registry;
}

}  // namespace torchft_ext

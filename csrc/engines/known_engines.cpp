#include "engines/known_engines.h"

#include <memory>
#include <utility>
#include <variant>

#include "base/fork.h"
#include "nccl/nccl_kind.h"

namespace torchft_ext {
namespace {

EngineKind hostEngineKind() {
  EngineKind kind;
  kind.name = "host";
  kind.make = [](const EngineRequest& request) -> EngineKind::Outcome {
    auto made = request.host();
    if (auto* failure = std::get_if<Failure>(&made)) return std::move(*failure);
    return MadeEngine{std::get<std::shared_ptr<Engine>>(std::move(made))};
  };
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

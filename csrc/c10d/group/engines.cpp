#include "c10d/group/engines.h"

#include <utility>
#include <variant>
#include <vector>

#include "c10d/group/host_options.h"
#include "c10d/work/comm_error.h"
#include "engines/known_engines.h"
#include "host/host_engine.h"
#include "host/process.h"

namespace torchft_ext {
namespace {

// "'ft', 'host', 'nccl' or 'gloo'"
std::string expectedNames() {
  std::string names = "'ft'";
  for (const std::string& name : engineNames()) names += ", '" + name + "'";
  return names + " or 'gloo'";
}

EngineKind::Outcome makeOf(const EngineKind& kind, const EngineRequest& request) {
  auto outcome = kind.make(request);
  if (kind.stop != nullptr && std::holds_alternative<MadeEngine>(outcome)) addExitStep(kind.stop);
  return outcome;
}

EngineChoice choiceOf(MadeEngine made, bool host, std::string why_no_device) {
  return {std::move(made.engine),
          Devices(host, std::move(made.platform), std::move(why_no_device), std::move(made.staged)),
          std::move(made.memory)};
}

// The part of an error that says why a CPU engine takes no device tensors.
std::string whyNotOnDevices(const EngineKind& kind, const EngineRequest& request,
                            const MadeEngine& made) {
  if (kind.for_devices) return "";
  if (request.staged) return made.staged ? "they go through host memory" : made.why_not_staged;
  return "use the backend 'ft', which serves both, or Options(staged=True), with which they go "
         "through host memory";
}

using Choice = std::variant<EngineChoice, Failure>;

// Both kinds of tensors: by the first engine for devices that is here, else by the CPU's.
Choice engineForAll(const std::vector<EngineKind>& kinds, const EngineRequest& request) {
  std::string why_none;
  for (const EngineKind& kind : kinds) {
    if (!kind.for_devices) continue;
    auto outcome = makeOf(kind, request);
    if (auto* failure = std::get_if<Failure>(&outcome)) return std::move(*failure);
    if (auto* made = std::get_if<MadeEngine>(&outcome))
      return choiceOf(std::move(*made), /*host=*/true, "");
    why_none += (why_none.empty() ? "" : "; ") + std::get<NotHere>(outcome).why;
  }
  auto made = request.host();
  if (auto* failure = std::get_if<Failure>(&made)) return std::move(*failure);
  return choiceOf({std::get<std::shared_ptr<Engine>>(std::move(made))}, /*host=*/true,
                  std::move(why_none));
}

Choice engineAlone(const EngineKind& kind, const EngineRequest& request) {
  auto outcome = makeOf(kind, request);
  if (auto* failure = std::get_if<Failure>(&outcome)) return std::move(*failure);
  const auto* not_here = std::get_if<NotHere>(&outcome);
  TORCH_CHECK_NOT_IMPLEMENTED(not_here == nullptr, "the backend 'ft:", kind.name, "' needs ",
                              kind.library, ": ", not_here == nullptr ? "" : not_here->why,
                              "; use 'ft:host' for CPU tensors");
  auto& made = std::get<MadeEngine>(outcome);
  std::string why_none = whyNotOnDevices(kind, request, made);
  return choiceOf(std::move(made), !kind.for_devices, std::move(why_none));
}

}  // namespace

EngineChoice makeEngine(const std::string& name, const FtOptions& options,
                        const c10::intrusive_ptr<c10d::Store>& store,
                        const std::optional<c10::Device>& bound_device,
                        std::shared_ptr<PoolRegistry> memory) {
  auto made = engineOrFailure(name, options, store, bound_device, std::move(memory));
  if (auto* failure = std::get_if<Failure>(&made))
    throwFailure(std::make_shared<Failure>(std::move(*failure)));
  return std::get<EngineChoice>(std::move(made));
}

std::variant<EngineChoice, Failure> engineOrFailure(const std::string& name,
                                                    const FtOptions& options,
                                                    const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::optional<c10::Device>& bound_device,
                                                    std::shared_ptr<PoolRegistry> memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      name != "gloo", "torchft_ext has no gloo engine yet: use 'ft:host', its own CPU engine");
  const EngineRequest request{[&] { return hostEngine(hostOptionsOf(options, store)); },
                              bound_device, options.high_priority_stream, std::move(memory),
                              options.staged.value_or(false)};
  TORCH_CHECK_VALUE(!request.staged || name == "host",
                    "Options.staged: expected it with the backend 'ft:host', whose device tensors "
                    "go through host memory then; found 'ft",
                    name == "ft" ? "" : ":" + name, "'");
  const EngineRegistry& registry = engineRegistry();
  if (name == "ft") return engineForAll(registry.all(), request);
  const auto kind = registry.find(name);
  TORCH_CHECK_VALUE(kind.has_value(), "engine: expected ", expectedNames(), ", found '", name, "'");
  return engineAlone(*kind, request);
}

std::vector<std::string> engineNames() {
  std::vector<std::string> names;
  for (const EngineKind& kind : engineRegistry().all()) names.push_back(kind.name);
  return names;
}

}  // namespace torchft_ext

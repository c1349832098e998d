#include "device/engine_registry.h"

#include <algorithm>
#include <utility>

namespace torchft_ext {

void EngineRegistry::registerEngine(EngineKind kind) {
  MutexLock lock(mutex_);
  const auto same = std::find_if(kinds_.begin(), kinds_.end(),
                                 [&](const EngineKind& one) { return one.name == kind.name; });
  if (same == kinds_.end()) {
    kinds_.push_back(std::move(kind));
  } else {
    std::swap(*same, kind);
  }
}

std::optional<EngineKind> EngineRegistry::find(const std::string& name) const {
  MutexLock lock(mutex_);
  const auto found = std::find_if(kinds_.begin(), kinds_.end(),
                                  [&](const EngineKind& one) { return one.name == name; });
  return found == kinds_.end() ? std::nullopt : std::optional<EngineKind>(*found);
}

std::vector<EngineKind> EngineRegistry::all() const {
  MutexLock lock(mutex_);
  return kinds_;
}

}  // namespace torchft_ext

#include "c10d/store/store_layers.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace torchft_ext {
namespace {

// torch has no accessor for the prefix.
struct PrefixReader : c10d::PrefixStore {
  static const std::string& prefixOf(const c10d::PrefixStore& store) {
    return store.*(&PrefixReader::prefix_);
  }
};

}  // namespace

std::string prefixOf(StorePtr store) {
  std::string prefix;
  while (const auto layer = storeAs<c10d::PrefixStore>(store)) {
    const std::string& own = PrefixReader::prefixOf(*layer);
    if (!prefix.empty()) prefix.insert(0, "/");
    prefix.insert(0, own);
    store = layer->getUnderlyingStore();
  }
  return prefix;
}

StorePtr withoutPrefixes(StorePtr store) {
  while (const auto layer = storeAs<c10d::PrefixStore>(store)) store = layer->getUnderlyingStore();
  return store;
}

}  // namespace torchft_ext

// What lies under c10d's PrefixStores.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace torchft_ext {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// What PrefixStores put before a key, in their way: outermost last.
std::string prefixOf(StorePtr store);
// The innermost store, which is no PrefixStore.
StorePtr withoutPrefixes(StorePtr store);

// Null where the store is no such one. (torch's own dynamic_intrusive_pointer_cast() keeps the
// object for ever then.)
template <typename Kind>
c10::intrusive_ptr<Kind> storeAs(const StorePtr& store) {
  auto* found = dynamic_cast<Kind*>(store.get());
  if (found == nullptr) return {};
  return c10::intrusive_ptr<Kind>::reclaim_copy(found);
}

}  // namespace torchft_ext

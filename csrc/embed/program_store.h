// A program's store as rendezvous sees it. Owner: the store thread.
#pragma once

#include <memory>

#include "membership/store_thread.h"
#include "torchft_ext/store.h"

namespace torchft_ext {

// The thread that talks to this store; the same one for as long as any group uses it.
std::shared_ptr<StoreThread> storeThreadOf(const std::shared_ptr<Store>& store);

}  // namespace torchft_ext

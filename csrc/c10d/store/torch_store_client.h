// Any c10d store as membership/store_client.h's client.
#pragma once

#include <exception>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "membership/store_client.h"

namespace torchft_ext {

// Owner and only user: one store thread. A TCPStore must be the client's own: it sets the timeout.
//
// A key that another process removes while it is being read is missing. Where that is one of
// several keys of a TCPStore, torch waits for it for as long as four round trips, 0.2 s at least,
// and logs that; of stores other than torch's TCPStore, HashStore and FileStore such a read takes
// the store's timeout and throws StoreError.
std::unique_ptr<ComparingStore> makeStoreClient(c10::intrusive_ptr<c10d::Store> store);
// Of a TCPStore that belongs to another, who may use it meanwhile. It changes nothing of it; many
// keys that are all there cost a round trip each.
std::unique_ptr<ComparingStore> makeLentClient(c10::intrusive_ptr<c10d::Store> store);

// What the call returns; whatever it throws, as a StoreError without torch's backtrace.
template <typename Call>
auto withStoreErrors(const Call& call) {
  try {
    return call();
  } catch (const StoreError&) {
    throw;
  } catch (const c10::Error& error) {
    throw StoreError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw StoreError(error.what());
  } catch (...) {
    throw StoreError("the store threw something that is no std::exception");
  }
}

}  // namespace torchft_ext

// Any c10d store as rendezvous/store.h's client.
#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/store.h"

namespace torchft_ext {

// How long the timeout of a store made for such a client ought to be: reading several keys of a
// TCPStore waits for so long where one of them is removed meanwhile, and nothing else waits.
constexpr std::chrono::milliseconds kClientTimeout{200};

// Owner and only user: one store thread. A key that another process removes while it is being read
// is missing. (Of stores other than torch's TCPStore, HashStore and FileStore such a read takes the
// store's timeout and throws StoreError.)
std::unique_ptr<StoreClient> makeStoreClient(c10::intrusive_ptr<c10d::Store> store);

// What the call returns; whatever it throws, as a StoreError without torch's backtrace.
template <typename Call>
auto withStoreErrors(const Call& call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    throw StoreError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw StoreError(error.what());
  } catch (...) {
    throw StoreError("the store threw something that is no std::exception");
  }
}

}  // namespace torchft_ext

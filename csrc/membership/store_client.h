// A key-value store as rendezvous needs it: few, small, bounded calls. The c10d one is in
// c10d/store/torch_store_client; tests use an in-memory one that counts calls and bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace torchft_ext {

// The server cannot be reached or broke its protocol.
class StoreError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// This process has no descriptor or port left for a connection (base/shortage.h).
class StoreShortage : public StoreError {
 public:
  using StoreError::StoreError;
};

// Called by the store thread only. A call may block for as long as the server is stuck: that is why
// it has a thread of its own. Each throws StoreError.
class StoreClient {
 public:
  virtual ~StoreClient() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // The values, or nullopt while any key is missing. Three round trips at most.
  virtual std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) = 0;
  virtual void remove(const std::string& key) = 0;
};

// One that can also change a value that nobody else has changed meanwhile.
class ComparingStore : public StoreClient {
 public:
  // Where `expected` stands under the key (empty: where nothing does): puts `desired` there.
  // Returns what stands there then; where nothing does and something was expected: `expected`. So
  // it was done where `desired` is returned, and they differ.
  virtual std::string compareSet(const std::string& key, const std::string& expected,
                                 const std::string& desired) = 0;
  // To the decimal number that stands under the key (nothing: 0); the sum, which stands there then.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
};
using ComparingStoreFactory = std::function<std::unique_ptr<ComparingStore>()>;

// Makes a client of its own when called, on the store thread. Throws StoreError.
using StoreFactory = std::function<std::unique_ptr<StoreClient>()>;

// A client that belongs to somebody else, who may be in a call of it at the same time: lent for as
// long as the pointer is held. Null: it is gone. Any thread; neither blocks nor throws.
using StoreLoan = std::function<std::shared_ptr<StoreClient>()>;

}  // namespace torchft_ext

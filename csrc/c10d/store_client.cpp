#include "c10d/store_client.h"

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

namespace torchft_ext {
namespace {

using Bytes = std::vector<uint8_t>;

// No key of ours ever holds it.
const Bytes& nothing() {
  static const Bytes bytes{0, 'n', 'o', 't', 'h', 'i', 'n', 'g'};
  return bytes;
}

template <typename Kind>
bool isA(const c10d::Store& store) {
  return dynamic_cast<const Kind*>(&store) != nullptr;
}

// torch's get() and multiGet() wait for keys that are missing. Its compareSet() does not, and
// answers with the expected value where there is none: setting what is not there from
// `nothing` to `nothing` changes nothing and tells what stands there, in one round trip.
bool comparesAsTorchDoes(c10::intrusive_ptr<c10d::Store> store) {
  while (auto prefix = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store)) {
    store = prefix->getUnderlyingStore();
  }
  return isA<c10d::TCPStore>(*store) || isA<c10d::HashStore>(*store) ||
         isA<c10d::FileStore>(*store);
}

class C10dStoreClient : public StoreClient {
 public:
  using Values = std::optional<std::vector<std::string>>;

  explicit C10dStoreClient(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)), compares_(comparesAsTorchDoes(store_)) {}

  void set(const std::string& key, const std::string& value) override {
    withStoreErrors([&] { store_->set(key, Bytes(value.begin(), value.end())); });
  }

  Values getAll(const std::vector<std::string>& keys) override {
    return withStoreErrors([&]() -> Values {
      if (compares_ && keys.size() == 1) return lookAtEach(keys);
      if (!store_->check(keys)) return std::nullopt;
      // One round trip for all is worth it where the store is far away.
      if (!compares_ || isA<c10d::TCPStore>(*store_)) {
        if (auto values = readAtOnce(keys)) return values;
      }
      return compares_ ? lookAtEach(keys) : std::nullopt;
    });
  }

  void remove(const std::string& key) override {
    withStoreErrors([&] { store_->deleteKey(key); });
  }

 private:
  Values lookAtEach(const std::vector<std::string>& keys) {
    std::vector<std::string> values;
    values.reserve(keys.size());
    for (const std::string& key : keys) {
      const Bytes value = store_->compareSet(key, nothing(), nothing());
      if (value.empty() || value == nothing()) return std::nullopt;
      values.emplace_back(value.begin(), value.end());
    }
    return values;
  }

  // nullopt: one of them is missing by now, or the server took its time.
  Values readAtOnce(const std::vector<std::string>& keys) {
    std::vector<std::string> values;
    values.reserve(keys.size());
    try {
      for (const Bytes& value : multiGet(keys)) {
        if (value.empty()) return std::nullopt;  // nobody here writes an empty value
        values.emplace_back(value.begin(), value.end());
      }
    } catch (const c10::DistStoreError&) {
      if (!compares_) throw;
      return std::nullopt;
    }
    return values;
  }

  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) {
    if (store_->hasExtendedApi()) return store_->multiGet(keys);
    std::vector<Bytes> values;
    values.reserve(keys.size());
    for (const std::string& key : keys) values.push_back(store_->get(key));
    return values;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const bool compares_;
};

}  // namespace

std::unique_ptr<StoreClient> makeStoreClient(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<C10dStoreClient>(std::move(store));
}

}  // namespace torchft_ext

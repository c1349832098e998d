#include "c10d/store/torch_store_client.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "c10d/store/store_layers.h"

namespace torchft_ext {
namespace {

using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;
using Values = std::optional<std::vector<std::string>>;

// What multiGet() of a TCPStore may wait: it knows no better way to say that a key is missing.
constexpr milliseconds kShortestWait{200};
constexpr milliseconds kLongestWait{500};  // well below that after which a thread counts as stuck
constexpr int kRoundTrips = 4;
// Of so many keys, single looks cost no more round trips than check() and multiGet().
constexpr size_t kFew = 3;

template <typename Kind>
bool isA(const c10d::Store& store) {
  return dynamic_cast<const Kind*>(&store) != nullptr;
}

class C10dStoreClient : public ComparingStore {
 public:
  explicit C10dStoreClient(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    withStoreErrors([&] { store_->set(key, Bytes(value.begin(), value.end())); });
  }

  Values getAll(const Keys& keys) override {
    return withStoreErrors([&] { return read(keys); });
  }

  void remove(const std::string& key) override {
    withStoreErrors([&] { store_->deleteKey(key); });
  }

  std::string compareSet(const std::string& key, const std::string& expected,
                         const std::string& desired) override {
    return withStoreErrors([&] {
      const Bytes found = store_->compareSet(key, Bytes(expected.begin(), expected.end()),
                                             Bytes(desired.begin(), desired.end()));
      return std::string(found.begin(), found.end());
    });
  }

  int64_t add(const std::string& key, int64_t amount) override {
    return withStoreErrors([&] { return store_->add(key, amount); });
  }

 protected:
  virtual Values read(const Keys& keys) {
    if (!store_->check(keys)) return std::nullopt;
    return store_->hasExtendedApi() ? valuesOf(store_->multiGet(keys)) : getEach(keys);
  }

  // Nobody here writes an empty value: the key is missing.
  static Values valuesOf(const std::vector<Bytes>& found) {
    std::vector<std::string> values;
    values.reserve(found.size());
    for (const Bytes& value : found) {
      if (value.empty()) return std::nullopt;
      values.emplace_back(value.begin(), value.end());
    }
    return values;
  }

  c10d::Store& store() const { return *store_; }

 private:
  Values getEach(const Keys& keys) {
    std::vector<Bytes> found;
    found.reserve(keys.size());
    for (const std::string& key : keys) found.push_back(store_->get(key));
    return valuesOf(found);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
};

// torch's get() and multiGet() wait for what is missing. compareSet() of its own stores does not:
// it answers with what stands there, or with the value expected where nothing does, and sets
// nothing then. (A TCPStore's server wakes those who wait for the key all the same.)
class ComparingClient : public C10dStoreClient {
 public:
  using C10dStoreClient::C10dStoreClient;

 protected:
  Values read(const Keys& keys) override {
    std::vector<Bytes> found;
    found.reserve(keys.size());
    for (const std::string& key : keys) {
      found.push_back(store().compareSet(key, nothing_, nothing_));
      if (found.back() == nothing_) return std::nullopt;
    }
    return valuesOf(found);
  }

 private:
  // No key of ours ever holds it. A member: threads may outlive static objects.
  const Bytes nothing_{0, 'n', 'o', 't', 'h', 'i', 'n', 'g'};
};

// Of a FileStore, where compareSet() locks others out, readers too; and of a TCPStore that belongs
// to another, where multiGet() would wait with that one's timeout.
class CheckingClient final : public ComparingClient {
 public:
  using ComparingClient::ComparingClient;

 private:
  Values read(const Keys& keys) override {
    return store().check(keys) ? ComparingClient::read(keys) : std::nullopt;
  }
};

// Its server may be far away.
class TcpClient final : public ComparingClient {
 public:
  using ComparingClient::ComparingClient;

 private:
  Values read(const Keys& keys) override {
    if (keys.size() <= kFew) return ComparingClient::read(keys);
    const auto began = Clock::now();
    if (!store().check(keys)) return std::nullopt;
    const auto round_trips = std::chrono::ceil<milliseconds>(kRoundTrips * (Clock::now() - began));
    store().setTimeout(std::clamp(round_trips, kShortestWait, kLongestWait));
    try {
      return valuesOf(store().multiGet(keys));
    } catch (const c10::DistStoreError& error) {
      // Anything else leaves a connection that cannot be used any more.
      if (std::strstr(error.what_without_backtrace(), "wait timeout") == nullptr) throw;
      return std::nullopt;
    }
  }
};

}  // namespace

std::unique_ptr<ComparingStore> makeStoreClient(c10::intrusive_ptr<c10d::Store> store) {
  if (isA<c10d::TCPStore>(*store)) return std::make_unique<TcpClient>(std::move(store));
  const auto inner = withoutPrefixes(store);
  if (isA<c10d::FileStore>(*inner)) return std::make_unique<CheckingClient>(std::move(store));
  const bool compares = isA<c10d::HashStore>(*inner) || isA<c10d::TCPStore>(*inner);
  if (compares) return std::make_unique<ComparingClient>(std::move(store));
  return std::make_unique<C10dStoreClient>(std::move(store));
}

std::unique_ptr<ComparingStore> makeLentClient(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<CheckingClient>(std::move(store));
}

}  // namespace torchft_ext

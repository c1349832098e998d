#include "c10d/store_client.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace torchft_ext {
namespace {

using Keys = std::vector<std::string>;
using Values = std::optional<std::vector<std::string>>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Long: a read that waited for a missing key would be seen to.
constexpr std::chrono::seconds kStoreTimeout{30};

c10d::TCPStoreOptions serverOptions() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return options;
}

// Another process removes the first key when this one has just found that all are there.
template <typename Kind>
class Vanishing : public Kind {
 public:
  using Kind::Kind;
  bool check(const std::vector<std::string>& keys) override {
    const bool found = Kind::check(keys);
    if (found && vanish) Kind::deleteKey(keys.front());
    return found;
  }
  bool vanish = false;
};

StorePtr withTimeout(StorePtr store, std::chrono::milliseconds timeout = kStoreTimeout) {
  store->setTimeout(timeout);
  return store;
}

void checkClient(const StorePtr& store) {
  const auto client = makeStoreClient(store);
  EXPECT_EQ(client->getAll({"a"}), std::nullopt);
  EXPECT_FALSE(store->check({"a"})) << "the look has made the key";
  client->set("a", "1");
  EXPECT_EQ(client->getAll({"a"}), Values({"1"}));
  EXPECT_EQ(client->getAll({"a", "b"}), std::nullopt);
  const std::string bytes("\0\xff two", 6);
  client->set("b", bytes);
  EXPECT_EQ(client->getAll({"a", "b"}), Values({"1", bytes}));
  EXPECT_EQ(client->getAll({"b"}), Values({bytes}));
  client->remove("a");
  EXPECT_EQ(client->getAll({"a"}), std::nullopt);
  EXPECT_EQ(client->getAll({"b", "a"}), std::nullopt);
}

TEST(StoreClient, ReadsWhatIsThereAndNeverWaitsForWhatIsNot) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  checkClient(withTimeout(hash));
  checkClient(withTimeout(c10::make_intrusive<c10d::PrefixStore>("under", hash)));
  checkClient(withTimeout(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", serverOptions())));
  const auto path = std::filesystem::temp_directory_path() /
                    ("torchft_ext_store_client_test." + std::to_string(::getpid()));
  checkClient(withTimeout(c10::make_intrusive<c10d::FileStore>(path.string(), 1)));
  std::filesystem::remove(path);
}

template <typename Kind>
void checkVanishing(const c10::intrusive_ptr<Vanishing<Kind>>& store) {
  const auto client = makeStoreClient(store);
  client->set("a", "1");
  client->set("b", "2");
  store->vanish = true;
  EXPECT_EQ(client->getAll({"a", "b"}), std::nullopt);
  store->vanish = false;
  EXPECT_EQ(client->getAll({"b"}), Values({"2"})) << "the connection serves on";
  client->set("a", "3");
  EXPECT_EQ(client->getAll({"a", "b"}), Values({"3", "2"}));
}

TEST(StoreClient, KeyThatIsRemovedWhileItIsReadIsMissing) {
  const auto hash = c10::make_intrusive<Vanishing<c10d::HashStore>>();
  hash->setTimeout(kStoreTimeout);
  checkVanishing<c10d::HashStore>(hash);
  const auto tcp = c10::make_intrusive<Vanishing<c10d::TCPStore>>("127.0.0.1", serverOptions());
  tcp->setTimeout(kClientTimeout);
  checkVanishing<c10d::TCPStore>(tcp);
}

// A user's own: of what a store may leave out, it has nothing.
class PlainStore : public c10d::Store {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    inner_->set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override { return inner_->get(key); }
  int64_t add(const std::string& key, int64_t value) override { return inner_->add(key, value); }
  bool deleteKey(const std::string& key) override { return inner_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return inner_->check(keys); }
  int64_t getNumKeys() override { return inner_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { inner_->wait(keys); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    inner_->wait(keys, timeout);
  }
  StorePtr clone() override { return c10::make_intrusive<PlainStore>(); }

 private:
  const c10::intrusive_ptr<c10d::HashStore> inner_ = c10::make_intrusive<c10d::HashStore>();
};

TEST(StoreClient, TakesAnyStore) {
  checkClient(c10::make_intrusive<PlainStore>());
}

TEST(StoreClient, TellsWhatTheStoreSaysWithoutABacktrace) {
  try {
    withStoreErrors([] { TORCH_CHECK(false, "the store is broken"); });
    FAIL() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_STREQ(error.what(), "the store is broken");
  }
}

}  // namespace
}  // namespace torchft_ext

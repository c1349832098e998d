#include "c10d/store/torch_store_client.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/deadline.h"
#include "c10d/store/store_layers.h"

namespace torchft_ext {
namespace {

using Keys = std::vector<std::string>;
using Values = std::optional<std::vector<std::string>>;

// Long: a read that waited for a missing key would be seen to.
constexpr std::chrono::seconds kStoreTimeout{30};

c10d::TCPStoreOptions serverOptions() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return options;
}

StorePtr tcpStore(bool use_libuv = true) {
  auto options = serverOptions();
  options.useLibUV = use_libuv;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

std::string temporaryPath() {
  const auto directory = std::filesystem::temp_directory_path();
  return directory / ("torchft_ext_store_client_test." + std::to_string(::getpid()));
}

StorePtr patient(StorePtr store) {
  store->setTimeout(kStoreTimeout);
  return store;
}

// Of several keys of a TCPStore an answer that is late reads as none.
Values readSoon(StoreClient& client, const Keys& keys) {
  Values values;
  for (int tries = 0; tries < 20 && !values; ++tries) values = client.getAll(keys);
  return values;
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
  EXPECT_EQ(client->getAll({"a", "b", "c", "d", "e"}), std::nullopt);
  for (const char* key : {"c", "d", "e"}) client->set(key, key);
  EXPECT_EQ(readSoon(*client, {"a", "b", "c", "d", "e"}), Values({"1", bytes, "c", "d", "e"}));
  store->set("a", std::vector<uint8_t>());
  EXPECT_EQ(client->getAll({"a"}), std::nullopt) << "nobody writes an empty value";
  EXPECT_EQ(client->getAll({"a", "b", "c", "d", "e"}), std::nullopt);
  client->remove("a");
  EXPECT_EQ(client->getAll({"a"}), std::nullopt);
  EXPECT_EQ(client->getAll({"b", "a"}), std::nullopt);
}

TEST(StoreClient, ReadsWhatIsThereAndNeverWaitsForWhatIsNot) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  checkClient(patient(hash));
  checkClient(patient(c10::make_intrusive<c10d::PrefixStore>("under", hash)));
  checkClient(patient(tcpStore()));
  checkClient(patient(tcpStore(/*use_libuv=*/false)));
  checkClient(patient(c10::make_intrusive<c10d::PrefixStore>("under", patient(tcpStore()))));
  const std::string path = temporaryPath();
  checkClient(patient(c10::make_intrusive<c10d::FileStore>(path, 1)));
  std::filesystem::remove(path);
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

template <typename Kind>
void checkVanishing(const c10::intrusive_ptr<Vanishing<Kind>>& store) {
  patient(store);
  const auto client = makeStoreClient(store);
  const Keys keys{"a", "b", "c", "d"};
  for (const auto& key : keys) client->set(key, key);
  store->vanish = true;
  EXPECT_EQ(client->getAll(keys), std::nullopt);
  store->vanish = false;
  EXPECT_EQ(client->getAll({"b"}), Values({"b"})) << "the connection serves on";
  client->set("a", "3");
  EXPECT_EQ(readSoon(*client, keys), Values({"3", "b", "c", "d"}));
}

TEST(StoreClient, KeyThatIsRemovedWhileItIsReadIsMissing) {
  const auto began = Clock::now();
  checkVanishing<c10d::TCPStore>(
      c10::make_intrusive<Vanishing<c10d::TCPStore>>("127.0.0.1", serverOptions()));
  const std::string path = temporaryPath();
  checkVanishing<c10d::FileStore>(c10::make_intrusive<Vanishing<c10d::FileStore>>(path, 1));
  std::filesystem::remove(path);
  EXPECT_LT(Clock::now() - began, kStoreTimeout / 2) << "it was waited for";
}

class Broken : public c10d::TCPStore {
 public:
  using c10d::TCPStore::TCPStore;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>&) override {
    C10_THROW_ERROR(DistStoreError, "Stop_waiting response is expected");
  }
};

TEST(StoreClient, AnswerThatIsNoneIsAnError) {
  const auto client = makeStoreClient(c10::make_intrusive<Broken>("127.0.0.1", serverOptions()));
  const Keys keys{"a", "b", "c", "d"};
  for (const auto& key : keys) client->set(key, key);
  EXPECT_THROW(client->getAll(keys), StoreError);
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

TEST(StoreLayers, OfAnyNumberThePrefixIsOneAndTheStoreIsLetGo) {
  auto inner = c10::make_intrusive<c10d::HashStore>();
  {
    const StorePtr outer = c10::make_intrusive<c10d::PrefixStore>(
        "outer", c10::make_intrusive<c10d::PrefixStore>("inner", inner));
    EXPECT_EQ(prefixOf(outer), "inner/outer");
    EXPECT_EQ(withoutPrefixes(outer).get(), inner.get());
    EXPECT_EQ(prefixOf(inner), "");
    EXPECT_TRUE(storeAs<c10d::HashStore>(inner));
    EXPECT_FALSE(storeAs<c10d::TCPStore>(outer));
    const auto client = makeStoreClient(outer);
  }
  EXPECT_EQ(inner.use_count(), 1U);
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

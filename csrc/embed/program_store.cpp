#include "embed/program_store.h"

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace torchft_ext {
namespace {

class ProgramsStore final : public StoreClient {
 public:
  explicit ProgramsStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    guarded([&] { store_->set(key, value); });
  }
  std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    guarded([&] {
      for (const std::string& key : keys) {
        auto value = store_->get(key);
        if (!value || value->empty()) return;
        values.push_back(std::move(*value));
      }
    });
    if (values.size() < keys.size()) return std::nullopt;
    return values;
  }
  void remove(const std::string& key) override {
    guarded([&] { store_->remove(key); });
  }

 private:
  template <typename Call>
  static void guarded(const Call& call) {
    try {
      call();
    } catch (const std::exception& error) {
      throw StoreError(error.what());
    }
  }

  const std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<StoreThread> storeThreadOf(const std::shared_ptr<Store>& store) {
  // The thread keeps the factory, and so the store: no other one has its address meanwhile.
  const auto address = reinterpret_cast<uintptr_t>(store.get());
  return StoreThread::forServer("store-" + std::to_string(address),
                                [store] { return std::make_unique<ProgramsStore>(store); });
}

}  // namespace torchft_ext

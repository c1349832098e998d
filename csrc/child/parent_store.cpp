#include "child/parent_store.h"

#include <utility>

namespace torchft_ext::child {

class ParentStore::Client final : public StoreClient {
 public:
  explicit Client(std::shared_ptr<ParentStore> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->ask([&](uint32_t number) { return storeSetFrame(number, key, value); });
  }
  std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override {
    auto values = store_->ask([&](uint32_t number) { return storeGetFrame(number, keys); });
    if (values.size() < keys.size()) return std::nullopt;
    return values;
  }
  void remove(const std::string& key) override {
    store_->ask([&](uint32_t number) { return storeRemoveFrame(number, key); });
  }

 private:
  const std::shared_ptr<ParentStore> store_;
};

StoreFactory ParentStore::factory() {
  return [self = shared_from_this()] { return std::make_unique<Client>(self); };
}

void ParentStore::answer(ParentsAnswer answer) {
  MutexLock lock(mutex_);
  const auto found = asked_.find(answer.number);
  if (found == asked_.end()) throw ProtocolError("an answer to nothing");
  found->second = std::move(answer);
  changed_.notifyAll();
}

std::vector<std::string> ParentStore::ask(const FrameOf& frame_of) {
  uint32_t number = 0;
  {
    MutexLock lock(mutex_);
    number = ++last_;
    asked_[number] = std::nullopt;
  }
  channel_->send(frame_of(number));
  MutexLock lock(mutex_);
  while (!asked_.at(number)) changed_.waitUntil(mutex_, Deadline::never());
  ParentsAnswer answer = *std::move(asked_.extract(number).mapped());
  if (answer.outcome == RequestEnd::kGood) return std::move(answer.values);
  throw StoreError(answer.values.empty() ? "the store failed" : answer.values.front());
}

}  // namespace torchft_ext::child

// A store server in memory, for tests: any number of clients, each counted under the name of the
// "process" that made it, and switches through which a test makes it fail, hang or dawdle. Threads:
// every method from any. The switches act on calls of all clients.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "membership/store_client.h"

namespace torchft_ext {

struct StoreUse {
  int clients = 0;
  int sets = 0;
  int looks = 0;  // getAll
  int removals = 0;
  size_t bytes = 0;  // keys and values, both ways
  int calls() const { return sets + looks + removals; }
};

class MemoryStore : public std::enable_shared_from_this<MemoryStore> {
 public:
  // Made by std::make_shared. `process`: under which name its calls are counted.
  std::unique_ptr<StoreClient> client(const std::string& process = "") {
    enter();
    MutexLock lock(mutex_);
    ++uses_[process].clients;
    return std::make_unique<Client>(shared_from_this(), process);
  }
  ComparingStoreFactory comparing(const std::string& process) {
    return [store = shared_from_this(), process] {
      store->enter();
      MutexLock lock(store->mutex_);
      ++store->uses_[process].clients;
      return std::make_unique<Client>(store, process);
    };
  }
  StoreFactory factory(const std::string& process) {
    return [store = shared_from_this(), process] { return store->client(process); };
  }

  // Every call throws StoreError(why), until mend().
  void fail(const std::string& why) {
    MutexLock lock(mutex_);
    error_ = why;
  }
  void mend() {
    MutexLock lock(mutex_);
    error_.reset();
  }
  // The next `count` calls throw, whoever makes them.
  void failNext(int count) {
    MutexLock lock(mutex_);
    failures_left_ = count;
  }
  // That call, counted from 1 over all clients and their making, is the first that the server does
  // not answer any more: it and all later ones throw, or do not return until release().
  enum class End { kDies, kFreezes };
  void endAt(int call, End how) {
    MutexLock lock(mutex_);
    ends_at_ = call;
    end_ = how;
  }
  bool ended() {
    MutexLock lock(mutex_);
    return ends_at_ > 0 && entered_ >= ends_at_;
  }
  // When it came to that call.
  std::optional<Clock::time_point> endedAt() {
    MutexLock lock(mutex_);
    return ended_at_;
  }
  // Calls do not return until release(); those that come later neither.
  void block() {
    MutexLock lock(mutex_);
    blocked_ = true;
  }
  // The next call alone does not return until release().
  void blockNext() {
    MutexLock lock(mutex_);
    block_next_ = true;
  }
  // The next write alone, likewise.
  void blockNextSet() {
    MutexLock lock(mutex_);
    block_next_set_ = true;
  }
  void release() {
    MutexLock lock(mutex_);
    blocked_ = block_next_ = block_next_set_ = false;
    ++releases_;
    changed_.notifyAll();
  }
  void delay(Duration each) {
    MutexLock lock(mutex_);
    delay_ = each;
  }
  // Calls that are inside the store, held up by block() or blockNext().
  int held() {
    MutexLock lock(mutex_);
    return held_;
  }

  // As another process would, uncounted and past the switches.
  void put(const std::string& key, const std::string& value) {
    MutexLock lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> peek(const std::string& key) {
    MutexLock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  void erase(const std::string& key) {
    MutexLock lock(mutex_);
    values_.erase(key);
  }
  // It restarts, empty.
  void clear() {
    MutexLock lock(mutex_);
    values_.clear();
  }
  size_t size() {
    MutexLock lock(mutex_);
    return values_.size();
  }
  StoreUse use(const std::string& process) {
    MutexLock lock(mutex_);
    return uses_[process];
  }

 private:
  class Client : public ComparingStore {
   public:
    Client(std::shared_ptr<MemoryStore> store, std::string process)
        : store_(std::move(store)), process_(std::move(process)) {}
    void set(const std::string& key, const std::string& value) override {
      store_->enterSet();
      MutexLock lock(store_->mutex_);
      StoreUse& use = store_->uses_[process_];
      ++use.sets;
      use.bytes += key.size() + value.size();
      store_->values_[key] = value;
    }
    std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override {
      store_->enter();
      MutexLock lock(store_->mutex_);
      StoreUse& use = store_->uses_[process_];
      ++use.looks;
      std::vector<std::string> values;
      for (const std::string& key : keys) {
        use.bytes += key.size();
        const auto found = store_->values_.find(key);
        if (found == store_->values_.end()) return std::nullopt;
        values.push_back(found->second);
      }
      for (const std::string& value : values) use.bytes += value.size();
      return values;
    }
    std::string compareSet(const std::string& key, const std::string& expected,
                           const std::string& desired) override {
      store_->enterSet();
      MutexLock lock(store_->mutex_);
      ++store_->uses_[process_].sets;
      const auto found = store_->values_.find(key);
      const std::string stands = found == store_->values_.end() ? "" : found->second;
      if (stands == expected) return store_->values_[key] = desired;
      return found == store_->values_.end() ? expected : stands;
    }
    int64_t add(const std::string& key, int64_t amount) override {
      store_->enterSet();
      MutexLock lock(store_->mutex_);
      ++store_->uses_[process_].sets;
      std::string& value = store_->values_[key];
      const int64_t sum = (value.empty() ? 0 : std::stoll(value)) + amount;
      value = std::to_string(sum);
      return sum;
    }
    void remove(const std::string& key) override {
      store_->enter();
      MutexLock lock(store_->mutex_);
      StoreUse& use = store_->uses_[process_];
      ++use.removals;
      use.bytes += key.size();
      store_->values_.erase(key);
    }

   private:
    const std::shared_ptr<MemoryStore> store_;
    const std::string process_;
  };

  void enterSet() {
    {
      MutexLock lock(mutex_);
      block_next_ = block_next_ || std::exchange(block_next_set_, false);
    }
    enter();
  }
  void enter() {
    MutexLock lock(mutex_);
    const Deadline delayed = Deadline::after(delay_);
    while (!delayed.expired()) changed_.waitUntil(mutex_, delayed);
    if (++entered_ == ends_at_) {
      ended_at_ = Clock::now();
      blocked_ = end_ == End::kFreezes;
      if (end_ == End::kDies) error_ = "connection reset by the test";
    }
    if (blocked_ || std::exchange(block_next_, false)) {
      const int before = releases_;
      ++held_;
      while (releases_ == before) changed_.waitUntil(mutex_, Deadline::never());
      --held_;
    }
    if (error_) throw StoreError(*error_);
    if (failures_left_ > 0) {
      --failures_left_;
      throw StoreError("connection reset by the test");
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::string> values_ GUARDED_BY(mutex_);
  std::map<std::string, StoreUse> uses_ GUARDED_BY(mutex_);
  std::optional<std::string> error_ GUARDED_BY(mutex_);
  int failures_left_ GUARDED_BY(mutex_) = 0;
  int entered_ GUARDED_BY(mutex_) = 0;
  int ends_at_ GUARDED_BY(mutex_) = 0;  // 0: never
  End end_ GUARDED_BY(mutex_) = End::kDies;
  std::optional<Clock::time_point> ended_at_ GUARDED_BY(mutex_);
  bool blocked_ GUARDED_BY(mutex_) = false;
  bool block_next_ GUARDED_BY(mutex_) = false;
  bool block_next_set_ GUARDED_BY(mutex_) = false;
  int releases_ GUARDED_BY(mutex_) = 0;
  int held_ GUARDED_BY(mutex_) = 0;
  Duration delay_ GUARDED_BY(mutex_){0};
};

}  // namespace torchft_ext

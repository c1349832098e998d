// The store, as the parent knows it: this process has no connection to it. Threads: factory()'s
// clients on store threads, which may wait as long as the parent does; answer() on the main one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "child/channel.h"
#include "membership/store_client.h"

namespace torchft_ext::child {

class ParentStore : public std::enable_shared_from_this<ParentStore> {
 public:
  explicit ParentStore(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

  StoreFactory factory();
  // The parent's answer to one request.
  void answer(ParentsAnswer answer) EXCLUDES(mutex_);

 private:
  class Client;
  using FrameOf = std::function<std::string(uint32_t number)>;
  // Blocks; throws StoreError.
  std::vector<std::string> ask(const FrameOf& frame_of) EXCLUDES(mutex_);

  const std::shared_ptr<Channel> channel_;
  Mutex mutex_;
  CondVar changed_;
  uint32_t last_ GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::optional<ParentsAnswer>> asked_ GUARDED_BY(mutex_);
};

}  // namespace torchft_ext::child

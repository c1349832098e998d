// What a forked child must know: that it is one. Of the parent's threads only the one that forked
// goes on, so an inherited lock may be held for good, and an inherited thread never ends.
#pragma once

#include <atomic>
#include <cstdint>

namespace torchft_ext {

// 0 in a process that was started, one more in each forked child. Any thread, never blocks.
uint64_t forkCount() noexcept;

// One T for each process: made at first use, made anew in a forked child. The inherited one is left
// as it is, since its locks may be held. Never destroyed: threads may use it while the process
// exits. A namespace-scope object only.
template <typename T>
class PerProcess {
 public:
  T& get() {
    const uint64_t fork_count = forkCount();
    Node* node = head_.load(std::memory_order_acquire);
    if (node != nullptr && node->fork_count == fork_count) return node->value;
    auto* fresh = new Node{{}, fork_count, node};
    if (head_.compare_exchange_strong(node, fresh, std::memory_order_acq_rel)) return fresh->value;
    delete fresh;  // another thread was first, and node is now its
    return node->value;
  }

 private:
  struct Node {
    T value;
    uint64_t fork_count;
    Node* inherited;  // keeps it reachable, for leak checkers
  };
  std::atomic<Node*> head_{nullptr};
};

}  // namespace torchft_ext

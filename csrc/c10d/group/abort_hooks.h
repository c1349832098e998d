// What torch calls abort hooks (2.14 and later): functions that are called when a generation fails,
// by timeout, loss, error or abort(), so that users can write down what they need for debugging.
//
// Once each for every generation that fails, on the callback thread (comm/callbacks.h), beside the
// abort and not before it: nothing that user code does may hold up the release of those who wait.
// They may block, issue, abort. Not for a configure() that fails, which says so itself, nor for
// goodbyes.
//
// Owner: the backend, and calls under way. Threads: any. Destruction does nothing.
#pragma once

#include <memory>

#include "c10d/work/hook_table.h"

namespace torchft_ext {

class AbortHooks : public std::enable_shared_from_this<AbortHooks> {
 public:
  using Hook = HookTable<>::Hook;

  HookTable<>& table() { return hooks_; }
  // Has all of them called, later. Never blocks.
  void call();

 private:
  HookTable<> hooks_{"abort hook"};
};

}  // namespace torchft_ext

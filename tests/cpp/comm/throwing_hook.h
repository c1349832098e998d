// A signal's handler that throws in every wait of the thread that made it, while it lives.
#pragma once

#include <thread>

#include "comm/op_state.h"

namespace torchft_ext {

struct Interrupted {};

class ThrowingHook {
 public:
  ThrowingHook() {
    thrower() = std::this_thread::get_id();
    setWaitHook([] {
      if (std::this_thread::get_id() == thrower()) throw Interrupted{};
    });
  }
  ~ThrowingHook() { setWaitHook(nullptr); }
  ThrowingHook(const ThrowingHook&) = delete;
  ThrowingHook& operator=(const ThrowingHook&) = delete;

 private:
  static std::thread::id& thrower() {
    static std::thread::id id;
    return id;
  }
};

}  // namespace torchft_ext

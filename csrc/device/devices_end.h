// The end of the process's devices. exit() unloads a device's runtime before torch destroys its
// tables and the groups in them. From then on every call of c10 into that device fails, and calls
// that are noexcept (the destructors of events and guards) terminate the process. A destructor that
// frees something on a device therefore asks devicesEnded() first, and leaks it where that is true.
//
// Threads: any. Never blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace torchft_ext {

// To be called when a device's runtime is in use: exit() works backwards, and so tells
// devicesEnded() before it unloads that runtime. Again: nothing.
void noteDevicesUsed();
// exit() has begun; always false where noteDevicesUsed() was never called.
bool devicesEnded();

// For good.
template <typename T>
void leak(const std::shared_ptr<T>& kept) {
  // A copy that nobody destroys, and not one from the heap: a destructor cannot report bad_alloc.
  alignas(std::shared_ptr<T>) std::byte copy[sizeof(std::shared_ptr<T>)];
  new (copy) std::shared_ptr<T>(kept);
}

}  // namespace torchft_ext

// The end of the process's devices. exit() unloads a device's runtime before torch's tables go, and
// with them the groups. Every call of c10's into that device fails from then on, and those that are
// noexcept (an event's end, a guard's) end the process. Whoever frees what is a device's therefore
// asks first, and at exit leaves it to the process's end.
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

// Whether the process's main thread waits in this library, for members that wait for this process.
// Any thread. Never blocks.
#pragma once

namespace torchft_ext {

bool mainThreadWaits();

// While it lives its thread waits in this library. Of other threads than the main one: nothing.
class MainThreadWaits {
 public:
  MainThreadWaits();
  ~MainThreadWaits();
  MainThreadWaits(const MainThreadWaits&) = delete;
  MainThreadWaits& operator=(const MainThreadWaits&) = delete;

 private:
  const bool counts_;
};

}  // namespace torchft_ext

// Writes whose calls did not return and were given up. One may reach the store late: after the
// attempt that made it has deleted its keys, or after what it wrote in their place.
//
// Owner: a StoreThread and its workers, which tell it of all they write. Threads: any. It never
// blocks and calls no store: the worker of the late call undoes the write. What other processes
// write meanwhile it does not know.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/mutex.h"

namespace torchft_ext {

class LateWrites {
 public:
  // value: empty: a removal.
  struct Write {
    std::string key;
    std::string value;
  };

  // The call that makes it is given up. A number for returned(), never 0.
  uint64_t giveUp(const Write& write);
  // This process writes that now, or has just found it there.
  void note(const Write& write);
  // The call has returned after all, or has failed. What is to stand in the place of what it wrote;
  // nullopt: nothing has been noted since.
  std::optional<std::string> returned(uint64_t number);

 private:
  struct Late {
    std::string key;
    std::optional<std::string> since;  // what was noted last
  };

  Mutex mutex_;
  std::map<uint64_t, Late> late_ GUARDED_BY(mutex_);
  uint64_t last_number_ GUARDED_BY(mutex_) = 0;
};

}  // namespace torchft_ext

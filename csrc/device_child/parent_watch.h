// Ends the process with its parent, though the main thread sits in a library and reads nothing.
//
// Owner: main(), by the engine that is served. Its thread waits without limit; destruction ends it.
#pragma once

#include <sys/types.h>

#include "base/threads.h"
#include "base/unique_fd.h"

namespace torchft_ext::device_child {

class ParentWatch {
 public:
  // socket: to the parent. Throws std::system_error.
  ParentWatch(int socket, pid_t parent);
  ~ParentWatch();
  ParentWatch(const ParentWatch&) = delete;
  ParentWatch& operator=(const ParentWatch&) = delete;

 private:
  UniqueFd stop_;  // closed: the thread ends
  OwnedThread thread_;
};

}  // namespace torchft_ext::device_child

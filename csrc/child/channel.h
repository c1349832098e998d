// The socket to the parent. Owner: main(). It ends when the parent closes it or ends, whichever is
// seen first: a fork of the parent may hold the other end open, and a big parent's descriptors
// close only after its memory has been freed.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "child/protocol.h"

namespace torchft_ext::child {

// On a process: readable once it has ended. None: the kernel cannot, or it is gone.
UniqueFd processDescriptor(pid_t pid);

class Channel {
 public:
  // parent: its process id.
  Channel(UniqueFd socket, pid_t parent);

  struct Frame {
    Kind kind;
    std::string payload;
  };
  // Main thread. Blocks until there is one; nullopt: the parent is gone. Throws ProtocolError.
  std::optional<Frame> receive();
  // Any thread. Blocks while the parent does not read; what cannot be sent is dropped, since then
  // receive() returns nullopt.
  void send(const std::string& frame) EXCLUDES(mutex_);

 private:
  bool fill(size_t count);  // false: the parent is gone

  const UniqueFd socket_;
  const UniqueFd parent_;  // readable once it has ended; none: the kernel cannot
  const bool orphaned_;
  std::string read_;
  Mutex mutex_;  // so that frames are sent whole; held while a send blocks
};

}  // namespace torchft_ext::child

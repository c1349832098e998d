// The socket to the parent. Owner: main(). It ends when the parent closes it or ends, whichever is
// seen first: a fork of the parent may hold the other end open, and a big parent's descriptors
// close only after its memory has been freed.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/mutex.h"
#include "base/unique_fd.h"
#include "child/protocol.h"

namespace torchft_ext::child {

// On a process: readable once it has ended. None: the kernel cannot, or it is gone.
UniqueFd processDescriptor(pid_t pid);

class Channel : public std::enable_shared_from_this<Channel> {
 public:
  // parent: its process id.
  Channel(UniqueFd socket, pid_t parent);

  struct Frame {
    Kind kind;
    std::string payload;
  };
  // Main thread. Blocks until there is one; nullopt: the parent is gone. Throws ProtocolError.
  std::optional<Frame> receive();
  // Any thread, the engine's among them: never blocks. What the parent does not take yet goes out
  // before what is sent later, from a callback thread; what cannot be sent any more is dropped,
  // since then receive() returns nullopt.
  void send(std::string_view frame) EXCLUDES(mutex_);

 private:
  bool fill(size_t count);  // false: the parent is gone
  void sendWhatFits() REQUIRES(mutex_);
  // Blocks until the parent has taken everything, or is gone. No deadline, as for receive(): this
  // process is there for its parent alone, who may be stopped for as long as it likes.
  void sendRest() EXCLUDES(mutex_);

  const UniqueFd socket_;
  const UniqueFd parent_;  // readable once it has ended; none: the kernel cannot
  const bool orphaned_;
  std::string read_;
  Mutex mutex_;  // held while bytes are handed to the kernel, which takes them or not
  std::string unsent_ GUARDED_BY(mutex_);       // what the parent does not take yet
  bool has_sender_ GUARDED_BY(mutex_) = false;  // a callback thread that waits to send it
};

}  // namespace torchft_ext::child

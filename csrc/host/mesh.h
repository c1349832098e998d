// Makes the connections of one generation: two channels to each other member. Channel kCollective
// carries kData and stops being read while no operation wants its frames; channel kControl is
// always read and carries messages, failures and goodbyes, so that no news ever waits behind data.
//
// A member connects to every lower rank, through its local socket where there is one and
// local_sockets says so, and admits every higher one. Loop thread only. Owner: the generation that
// forms. It never blocks; no callback runs after its destruction, which forgets the nonce at the
// listener.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "membership/rendezvous.h"
#include "net/connector.h"
#include "net/listener.h"

namespace torchft_ext {

enum Channel : int { kCollective = 0, kControl = 1 };
inline constexpr int kChannels = 2;

class Mesh {
 public:
  struct Callbacks {
    std::function<void(int rank, Channel channel, UniqueFd fd)> arrived;
    // A channel cannot be made: refused for good, or not by the deadline. May be called for
    // several.
    std::function<void(int rank, const std::string& why, bool timed_out)> failed;
    // This process has no descriptor, port or memory left for a channel (base/shortage.h).
    // Likewise.
    std::function<void(const std::string& why)> starved;
  };

  Mesh(EventLoop& loop, std::shared_ptr<Listener> listener, const Roster& roster, int rank,
       bool local_sockets, Deadline deadline, Callbacks callbacks);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchft_ext

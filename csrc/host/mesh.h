// All links of one epoch: two lanes to each other member. Lane kCollective carries kData and stops being read while
// no operation wants its frames; lane kControl is always read and carries messages, failures and goodbyes.
//
// Loop thread only. Owner: the host communicator, or the attempt that forms it.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/link.h"
#include "net/connector.h"
#include "net/listener.h"
#include "rendezvous/rendezvous.h"

namespace torchft_ext {

enum Lane : int { kCollective = 0, kControl = 1, kLanes = 2 };

// Connects to every lower rank, admits every higher one; done when all lanes stand.
class MeshBuilder {
 public:
  using Sockets = std::vector<std::array<UniqueFd, kLanes>>;  // by rank; own rank: invalid
  struct Result {
    Sockets sockets;
    std::string error;       // empty: all lanes stand
    int culprit = -1;        // the rank that could not be reached
    bool timed_out = false;
  };
  using Callback = std::function<void(Result)>;  // once, on the loop; never after destruction

  MeshBuilder(EventLoop& loop, std::shared_ptr<Listener> listener, const Roster& roster, int rank,
              Deadline deadline, Callback callback);
  ~MeshBuilder();  // forgets the nonce at the listener, drops half-made connections

  std::vector<int> missing() const;  // ranks of which a lane is not up yet

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchft_ext

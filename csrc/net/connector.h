// Makes one connection and its handshake; tries again while the peer may yet come up.
//
// Owner: whoever waits for the connection; must not outlive the loop. Loop thread only (destroyed
// elsewhere, a callback may be under way meanwhile). The callback runs exactly once, on the loop,
// never from inside the constructor, unless the Connector is destroyed first: then never. It may
// destroy the Connector. Retries after 1, 2, 4 ... 50 ms on "connection refused", reset, and
// kUnknownGeneration, until the deadline; gives an address up at once on a wrong secret, wrong
// process or wire version, and fails when no address is left. It never blocks and reads nothing
// beyond the handshake. Where this process has had no descriptor, port or memory for a try at any
// address for a second (base/shortage.h), it fails too: what is missing, others cannot mend.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/event_loop.h"
#include "net/handshake.h"
#include "net/socket_address.h"

namespace torchft_ext {

class Connector {
 public:
  struct Result {
    UniqueFd fd;        // invalid: failed
    std::string error;  // what happened last, with the address
    bool timed_out = false;
    bool starved = false;  // for want of something of this process
  };
  using Callback = std::function<void(Result)>;

  // Addresses are tried in turn, but for local ones of other hosts; where there are several TCP
  // ones, each of those for a bounded time. expected is what the acceptor must answer.
  Connector(EventLoop& loop, const std::vector<SocketAddress>& addresses, Hello hello,
            Welcome expected, Deadline deadline, Callback callback);
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

 private:
  struct Impl;
  EventLoop& loop_;
  std::shared_ptr<std::atomic<bool>> cancelled_;
  std::weak_ptr<Impl>
      impl_;  // the loop's handlers own it: its descriptor is always closed by the loop's thread
};

}  // namespace torchft_ext

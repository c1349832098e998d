// Makes one connection and its handshake; tries again while the peer may yet come up.
//
// Loop thread only. The callback runs exactly once, on the loop, unless the Connector is destroyed first:
// then never. Retries after 1, 2, 4 ... 50 ms on "connection refused", reset, and kUnknownEpoch, until the
// deadline; gives up at once on a wrong secret, wrong process or wire version.
#pragma once

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
  };
  using Callback = std::function<void(Result)>;

  // Addresses are tried in turn. expected is what the acceptor must answer.
  Connector(EventLoop& loop, std::vector<SocketAddress> addresses, Hello hello, Welcome expected,
            Deadline deadline, Callback callback);
  ~Connector();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchft_ext

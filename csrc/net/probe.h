// Does that process still live? Asks as often as it takes for a clear answer (net/dial.h): a
// connection that ends without a word is tried again twice, a few milliseconds later, since the
// process may be ending (the third such end counts as kGone), or something cuts connections, of
// which this was one; as long as this process can open no connection, nothing is known; and a route
// that is not there may come back, up to the deadline. The deadline counts for each connection, and
// for each answer from when it was asked for: time in which this process was stopped is nobody's
// silence. Each has 100 ms at least.
//
// Loop thread only. The callback runs once, on the loop, never from the constructor nor after
// destruction; it may destroy the Probe.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "net/dial.h"
#include "net/event_loop.h"
#include "net/handshake.h"
#include "net/socket_address.h"

namespace torchft_ext {

class Probe {
 public:
  using Callback = std::function<void(Liveness, const std::string& detail)>;

  // who: the life that is asked about.
  Probe(EventLoop& loop, const SocketAddress& address, const Incarnation& who, Deadline deadline,
        Callback callback);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

 private:
  void ask();
  void askAgain();
  void onEnd(const Dial::Result& result);
  void onUnclear(const Dial::Result& result);
  void finish(Liveness answer, const std::string& detail);

  EventLoop& loop_;
  const SocketAddress address_;
  const Incarnation who_;
  const Deadline deadline_;
  int tries_left_ = 3;
  std::unique_ptr<Dial> dial_;
  EventLoop::TimerId retry_ = 0;
  Callback callback_;
};

}  // namespace torchft_ext

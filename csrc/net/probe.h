// Does that process still live? Asks its published ports, under a nonce that every listener answers
// and admits nobody by, as often as it takes for a clear answer (net/probe_course.h). The one
// prober: whoever asks a port, asks through it, each with a patience of its own.
//
// The time for connections counts from the construction, all tries together. Each try has a least
// time of its own, and each answer's time counts from when it was asked for: time in which this
// process was stopped is nobody's silence.
//
// Loop thread only. The callback runs once, on the loop, never from the constructor nor after
// destruction; it may destroy the Probe. Destroyed, it closes the connection under way and asks
// nobody any more.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/dial.h"
#include "net/event_loop.h"
#include "net/probe_course.h"
#include "net/socket_address.h"

namespace torchft_ext {

struct ProbeQuestion {
  Incarnation self;                      // who asks
  Incarnation who;                       // the life that is asked about
  std::vector<SocketAddress> addresses;  // of its ports: at least one; each try takes the next
  uint8_t channel = 0;                   // in the hello
};

struct ProbeAnswer {
  Liveness liveness = Liveness::kUnknown;
  std::string detail;  // empty: it lives
  Duration waited{};   // since the last try began
  size_t tries = 0;
};

class Probe {
 public:
  using Callback = std::function<void(const ProbeAnswer&)>;

  Probe(EventLoop& loop, ProbeQuestion question, const ProbePatience& patience, Callback callback);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

 private:
  void ask();
  void onEnd(const Dial::Result& result);

  EventLoop& loop_;
  const ProbeQuestion question_;
  ProbeCourse course_;
  size_t tries_ = 0;
  Clock::time_point asked_;
  std::unique_ptr<Dial> dial_;
  EventLoop::TimerId retry_ = 0;
  Callback callback_;
};

}  // namespace torchft_ext

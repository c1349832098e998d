// Does anybody listen there? One TCP connection attempt, closed at once. Used to tell a dead
// process (its listener is gone: refused) from a cut connection (its kernel accepts: it lives).
//
// Loop thread only. The callback runs once, on the loop, never after destruction.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "net/event_loop.h"
#include "net/socket_address.h"

namespace torchft_ext {

class Probe {
 public:
  enum class Answer { kAccepted, kRefused, kUnreachable };
  using Callback = std::function<void(Answer, const std::string& detail)>;

  Probe(EventLoop& loop, const SocketAddress& address, Deadline deadline, Callback callback);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

 private:
  void finish(Answer answer, const std::string& detail);
  void onWritable();

  EventLoop& loop_;
  UniqueFd fd_;
  EventLoop::TimerId timer_ = 0;
  Callback callback_;
};

}  // namespace torchft_ext

// Connections that have yet to prove something: bounded in number and time, first in, first out.
//
// Owner: a Listener's Impl. Loop thread only. clear() before the end; afterwards nothing of it is
// called again.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <utility>

#include "net/event_loop.h"
#include "net/frame_inbox.h"
#include "net/handshake.h"

namespace torchft_ext {

class PendingConnections {
 public:
  struct Pending {
    UniqueFd fd;
    bool local = false;  // came through the local socket
    FrameInbox inbox{{FrameType::kHello}};
    Hello hello;  // once it has been read
    Clock::time_point until{};
  };
  using Pendings = std::list<Pending>;
  using Place = Pendings::iterator;

  // dismissed: the connection has waited too long, or is the oldest of too many. keep_alive yields
  // the owner, which timers hold.
  PendingConnections(EventLoop& loop, size_t capacity, Duration patience,
                     std::function<void(Pending)> dismissed,
                     std::function<std::shared_ptr<void>()> keep_alive)
      : loop_(loop),
        capacity_(capacity),
        patience_(patience),
        dismissed_(std::move(dismissed)),
        keep_alive_(std::move(keep_alive)) {}

  Place add(Pending pending) {
    if (connections_.size() >= capacity_) dismissed_(remove(connections_.begin()));
    pending.until = Clock::now() + patience_;
    connections_.push_back(std::move(pending));
    if (timer_ == 0) arm();
    return std::prev(connections_.end());
  }

  Pending remove(Place place) {
    loop_.unwatch(place->fd.get());
    Pending pending = std::move(*place);
    connections_.erase(place);
    return pending;
  }

  Pendings& connections() { return connections_; }

  void clear() {
    while (!connections_.empty()) remove(connections_.begin());
    loop_.cancel(std::exchange(timer_, 0));
  }

 private:
  void arm() {
    timer_ = loop_.runAt(connections_.front().until, [this, owner = keep_alive_()] { sweep(); });
  }

  void sweep() {
    timer_ = 0;
    const auto now = Clock::now();
    while (!connections_.empty() && connections_.front().until <= now)
      dismissed_(remove(connections_.begin()));
    if (!connections_.empty() && timer_ == 0) arm();
  }

  EventLoop& loop_;
  const size_t capacity_;
  const Duration patience_;
  const std::function<void(Pending)> dismissed_;
  const std::function<std::shared_ptr<void>()> keep_alive_;
  Pendings connections_;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace torchft_ext

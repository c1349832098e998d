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

class WaitingRoom {
 public:
  struct Guest {
    UniqueFd fd;
    bool local = false;  // came through the local socket
    FrameInbox inbox{{FrameType::kHello}};
    Hello hello;  // once it has been read
    Clock::time_point until{};
  };
  using Guests = std::list<Guest>;
  using Place = Guests::iterator;

  // dismissed: the guest has waited too long, or is the oldest of too many. keep_alive yields the
  // owner, which timers hold.
  WaitingRoom(EventLoop& loop, size_t capacity, Duration patience,
              std::function<void(Guest)> dismissed,
              std::function<std::shared_ptr<void>()> keep_alive)
      : loop_(loop),
        capacity_(capacity),
        patience_(patience),
        dismissed_(std::move(dismissed)),
        keep_alive_(std::move(keep_alive)) {}

  Place add(Guest guest) {
    if (guests_.size() >= capacity_) dismissed_(remove(guests_.begin()));
    guest.until = Clock::now() + patience_;
    guests_.push_back(std::move(guest));
    if (timer_ == 0) arm();
    return std::prev(guests_.end());
  }

  Guest remove(Place place) {
    loop_.unwatch(place->fd.get());
    Guest guest = std::move(*place);
    guests_.erase(place);
    return guest;
  }

  Guests& guests() { return guests_; }

  void clear() {
    while (!guests_.empty()) remove(guests_.begin());
    loop_.cancel(std::exchange(timer_, 0));
  }

 private:
  void arm() {
    timer_ = loop_.runAt(guests_.front().until, [this, owner = keep_alive_()] { sweep(); });
  }

  void sweep() {
    timer_ = 0;
    const auto now = Clock::now();
    while (!guests_.empty() && guests_.front().until <= now) dismissed_(remove(guests_.begin()));
    if (!guests_.empty() && timer_ == 0) arm();
  }

  EventLoop& loop_;
  const size_t capacity_;
  const Duration patience_;
  const std::function<void(Guest)> dismissed_;
  const std::function<std::shared_ptr<void>()> keep_alive_;
  Guests guests_;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace torchft_ext

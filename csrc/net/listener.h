// The process's door: one listening socket, which admits only those who know an epoch's secret.
//
// Owned by the engine room; lives on one EventLoop. Threads: construct and destroy anywhere; the rest on the
// loop. A connection has 2 s to say a well-formed hello and costs one descriptor meanwhile; at most
// kMaxStrangers wait so at a time, the oldest is dropped for a newer one. One that names an epoch not
// expected yet is parked (its hello kept, nothing answered) for at most kParkedFor, at most kMaxParked
// of them; expect() then admits it. It never blocks, never reads more than a hello, never trusts a length.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>

#include "net/event_loop.h"
#include "net/handshake.h"
#include "net/socket_address.h"

namespace torchft_ext {

// An admitted connection: handshake done, nothing read beyond it.
struct Arrival {
  UniqueFd fd;
  int rank = -1;
  int lane = 0;
  Incarnation from;
};

class Listener {
 public:
  static constexpr int kMaxStrangers = 256;
  static constexpr int kMaxParked = 1024;
  static constexpr std::chrono::seconds kHelloWithin{2};
  static constexpr std::chrono::seconds kParkedFor{30};

  // The handler owns the connection; returning false refuses it (kDuplicate).
  using Handler = std::function<bool(Arrival&)>;

  struct Counts {
    uint64_t accepted = 0;
    uint64_t admitted = 0;
    uint64_t refused = 0;  // wrong secret, malformed, too slow, too many
  };

  // error is set and nullptr returned when no port can be had.
  static std::shared_ptr<Listener> open(EventLoop& loop, const SocketAddress& address, PortRange ports,
                                        std::string* error);
  ~Listener();

  const SocketAddress& address() const { return address_; }
  // Admits connections for this epoch until forget(); parked ones are admitted before it returns.
  void expect(const Nonce& nonce, const EpochSecret& secret, Handler handler);
  void forget(const Nonce& nonce);
  Counts counts() const;  // any thread

 private:
  struct Impl;
  Listener(SocketAddress address, std::shared_ptr<Impl> impl);
  SocketAddress address_;
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchft_ext

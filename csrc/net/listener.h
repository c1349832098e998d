// Where the process listens: a listening TCP socket and, where there may be one, a local one for
// peers of this host. Both admit only those who know a generation's secret, the local one only
// processes of this user: another one's could make a read or a close take as long as it likes, by
// descriptors that it sends along. So its connections are closed unread by a thread of their own,
// which exists once there was one, and too many of them close the local socket for good.
//
// Owner: the host engine, and each LivenessTable; lives on one EventLoop, which it must not
// outlive. Threads: construct and destroy anywhere; the rest on the loop. Destroyed on the loop, no
// handler is called any more; destroyed elsewhere, one may still run until the loop has come to its
// clean-up. A connection has 2 s to say a well-formed hello and costs one descriptor meanwhile; at
// most kMaxStrangers wait so at a time, the oldest is dropped for a newer one. One that names a
// generation not expected yet is parked (its hello kept, nothing answered) for at most kParkedFor,
// at most kMaxParked of them; expect() then admits it; a nonce of zero is a Probe's, and answered.
// Where the limit of open files is low, fewer may wait: an eighth and a quarter of what it was at
// open(), so that no stranger takes the process's own descriptors. It never blocks, never reads
// more than a hello, never trusts a length.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/event_loop.h"
#include "net/handshake.h"
#include "net/socket_address.h"

namespace torchft_ext {

// An admitted connection: handshake done, nothing read beyond it.
struct Arrival {
  UniqueFd fd;
  int rank = -1;
  int channel = 0;
  Incarnation from;
};

class Listener {
 public:
  static constexpr int kMaxStrangers = 256;
  static constexpr int kMaxParked = 1024;
  static constexpr int kMaxTurnedAway = 64;  // other users' connections, waiting to be closed
  static constexpr std::chrono::seconds kHelloWithin{2};
  static constexpr std::chrono::seconds kParkedFor{30};

  // The handler owns the connection, which has been welcomed; returning false ends it with a
  // refusal (kDuplicate). It may call expect() and forget(), and may destroy the Listener.
  using Handler = std::function<bool(Arrival&)>;
  // Once: connections wait to be accepted, and this process has had no descriptor for them for a
  // second. They are let in all the same once there is one. May call forget().
  using Starved = std::function<void(const std::string& why)>;

  struct Counts {
    uint64_t accepted = 0;
    uint64_t admitted = 0;
    uint64_t admitted_locally = 0;  // of them, through the local socket
    uint64_t refused = 0;           // wrong secret, malformed, too slow, too many
    uint64_t parked = 0;            // now waiting for their generation
  };

  // error is set and nullptr returned when no port can be had. local: a name from
  // newLocalAddress(); where it cannot be had, there is no local socket. Not for a loop with a
  // private table.
  static std::shared_ptr<Listener> open(EventLoop& loop, const SocketAddress& address,
                                        PortRange ports, std::string* error,
                                        const Incarnation& self = selfIncarnation(),
                                        const std::optional<SocketAddress>& local = std::nullopt);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  const SocketAddress& address() const { return addresses_.back(); }          // the TCP one
  const std::vector<SocketAddress>& addresses() const { return addresses_; }  // cheapest first
  // Admits connections for this generation until forget(); parked ones are admitted before it
  // returns.
  void expect(const Nonce& nonce, const GenerationSecret& secret, Handler handler,
              Starved starved = nullptr);
  void forget(const Nonce& nonce);
  Counts counts() const;  // any thread

 private:
  struct Impl;
  struct AtomicCounts;
  Listener(EventLoop& loop, const std::shared_ptr<Impl>& impl);

  EventLoop& loop_;
  const std::vector<SocketAddress> addresses_;
  const std::shared_ptr<const AtomicCounts> counts_;
  // The loop's handlers own it, so that its descriptors are always closed by the loop's thread.
  // Locked there alone.
  const std::weak_ptr<Impl> impl_;
};

}  // namespace torchft_ext

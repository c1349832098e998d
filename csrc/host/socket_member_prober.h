// Probes members: makes small connections to the processes' ports, under the nonce that every
// listener answers and admits nobody by.
//
// The ports of the peer monitors are asked, each in turn: they live in private descriptor tables,
// of which at least one is closed within milliseconds of a death, before the process's memory is
// freed. Lives on the engine's loop, which must outlive it; has no thread of its own. Each process
// is asked every 25 ms (net/probe.h), in large worlds less often, so that neither end sees more
// than 400 probes a second. Tries that meet the network's trouble (no route, a connection that is
// cut) are repeated sooner, after 1 ms, 2, 4 and so on, up to 25.
#pragma once

#include <memory>
#include <string>

#include "membership/member_prober.h"
#include "net/event_loop.h"

namespace torchft_ext {

struct MemberProberOptions {
  Incarnation self;
  std::string host;             // this host's name, to know which processes' /proc can be read
  Duration heartbeat_limit{0};  // silent for so long: frozen; 0: never
  int world = 2;
};

std::unique_ptr<MemberProber> makeSocketMemberProber(EventLoop& loop,
                                                     const MemberProberOptions& options);

}  // namespace torchft_ext

// Doors for tests alone.
#pragma once

#include "peers/peer_monitor.h"

namespace torchft_ext {

// Shuts down the socket of this process's main line to the peer, as a broken network would. Any
// thread.
void cutLineForTest(PeerMonitor& monitor, const Incarnation& peer);
// Keeps its threads from everything else for so long. Any thread.
void holdUpForTest(PeerMonitor& monitor, Duration how_long);

}  // namespace torchft_ext

// A network without ports: this program's net/sockets.cpp. Who connects gets one end of a socket
// pair and the fuzz target the other; who listens accepts the ends that the target has sent to the
// acceptor. Nothing waits, and no connection outlives its input.
//
// One thread at a time: the fuzz target's loop.
#pragma once

#include <vector>

#include "net/socket_address.h"

namespace torchft_ext::fuzz {

struct Pair {
  UniqueFd near;
  UniqueFd far;
  Pair();
};

struct Dialled {
  UniqueFd far;
  SocketAddress to;
};
std::vector<Dialled> takeDialled();  // since the last call
UniqueFd arriveAtAcceptor();         // the far end; the near one waits to be accepted
void forgetArrivals();

}  // namespace torchft_ext::fuzz

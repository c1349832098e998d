// Questions to the system's resolver, which knows no deadline.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "net/socket_address.h"

namespace torchft_ext {

// Calls `look` on a thread of its own, "ft-resolver", and returns what it found. By the deadline it
// has answered, or RendezvousError says that the look-up of `subject` was not answered and what to
// do; the thread then stays until the resolver lets it go, and counts as stuck. `look` must own
// what it touches. May throw what it throws, and what a signal's handler throws.
std::optional<SocketAddress> lookUp(const std::string& subject, Duration limit,
                                    std::function<std::optional<SocketAddress>()> look);

}  // namespace torchft_ext

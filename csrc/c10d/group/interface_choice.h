// Which local address a group listens on and publishes.
#pragma once

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/group/environment.h"
#include "c10d/group/options.h"
#include "c10d/store/store_adapter.h"
#include "net/socket_address.h"

namespace torchft_ext {

// In this order: the option, TORCHFT_EXT_SOCKET_IFNAME, GLOO_SOCKET_IFNAME (a name that no
// interface has is a ValueError); the address by which the store's host is reached; the address of
// this host's name; loopback. Names are looked up within the options' timeout, 10 s at most:
// RendezvousError where the resolver does not answer.
SocketAddress chooseAddress(const FtOptions& options, const Environment& environment,
                            const c10::intrusive_ptr<c10d::Store>& store);
// The same for the server at this address; nullopt: none is known.
SocketAddress chooseAddressTowards(const FtOptions& options, const Environment& environment,
                                   const std::optional<HostAndPort>& server);

// The name of the interface that has this ip; empty: none has.
std::string interfaceOf(const SocketAddress& address);
// The first address of that name; nullopt if it does not resolve. Blocks as long as the resolver.
std::optional<SocketAddress> resolveAddress(const std::string& host, uint16_t port);

}  // namespace torchft_ext

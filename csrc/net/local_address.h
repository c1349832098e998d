// Addresses by which processes of one host reach each other without TCP: abstract Unix sockets,
// three to four times cheaper to connect and close. Their names carry where they can be reached
// from, since an abstract name belongs to one network namespace of one running kernel.
//
// Every process of that namespace can find them (/proc/net/unix) and connect; the handshake is the
// same, and other users are turned away before it (net/listener.h). Only TCP addresses tell whether
// a process lives: that nobody answers by a local name may mean that this is another host.
// Functions, any thread.
#pragma once

#include <optional>
#include <vector>

#include "net/socket_address.h"

namespace torchft_ext {

// A name that nobody has yet, for listenOn(). nullopt: the kernel does not tell where we are.
std::optional<SocketAddress> newLocalAddress();
// True for every TCP address; for a local one where it is of this namespace of this kernel. Where
// two hosts are alike in this (a copied machine), nobody answers by that name.
bool isReachableFromHere(const SocketAddress& address);
// Who is at the other end of a connected local socket runs under this process's user.
bool isOfOwnUser(int fd);
std::vector<SocketAddress> withoutLocal(const std::vector<SocketAddress>& addresses);

}  // namespace torchft_ext

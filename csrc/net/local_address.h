// Addresses by which processes of one host reach each other without TCP: abstract Unix sockets,
// three to four times cheaper to connect and close. Their names carry where they can be reached
// from, since an abstract name belongs to one network namespace of one running kernel.
//
// Like loopback, they are open to every process of that namespace, and guarded by the same
// handshake. Functions, any thread.
#pragma once

#include <optional>

#include "net/socket_address.h"

namespace torchft_ext {

// A name that nobody can guess, for listenOn(). nullopt: the kernel does not tell where we are.
std::optional<SocketAddress> newLocalAddress();
// True for every TCP address; for a local one where it is of this namespace of this kernel. Where
// two hosts are alike in this (a copied machine), nobody answers by that name.
bool isReachableFromHere(const SocketAddress& address);

}  // namespace torchft_ext

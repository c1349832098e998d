// c10d's stores behind membership/store_client.h, and the addresses of stores.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "membership/store_client.h"
#include "membership/store_thread.h"
#include "net/socket_address.h"

namespace torchft_ext {

struct HostAndPort {
  std::string host;  // without brackets
  uint16_t port = 0;
};
// "host:port/prefix", "[v6]:port/prefix". The prefix is used verbatim and may contain slashes.
struct StoreAddress : HostAndPort {
  StoreAddress() = default;
  StoreAddress(std::string its_host, uint16_t its_port, std::string its_prefix)
      : HostAndPort{std::move(its_host), its_port}, prefix(std::move(its_prefix)) {}
  std::string prefix;
};
// ValueError naming what was expected and what was found. argument: "operation: argument".
StoreAddress parseStoreAddress(const char* argument, const std::string& text);
// The same of "host:port", "[v6]:port".
HostAndPort parseHostAndPort(const char* argument, const std::string& text);
uint16_t parsePort(const char* argument, const std::string& text);

// A thread with a client of its own to the TCPStore at this address: shared by all groups that name
// it.
std::shared_ptr<StoreThread> storeThreadFor(const StoreAddress& address);
// Makes clients of their own to the TCPStore at this address.
ComparingStoreFactory clientsOf(const StoreAddress& address);
// Where the keys of a store handed in by a caller lie.
struct StorePlace {
  std::shared_ptr<StoreThread> thread;
  std::string prefix;  // of every key; empty: none
};
// A TCPStore under any number of PrefixStores: the thread of its address, which a later generation
// at that address then finds. Where that thread has no connection, it is lent this one, as long as
// its owner keeps it: a new one may cost everyone seconds (store_thread.h). Its owner and torch may
// use it at the same time: of ours, each call ends with the server's answer, none waits for a key,
// and none changes its timeout. One that does not return is made over a connection of its own after
// 15 s, or after half of an attempt's limit.
// Other stores: a thread with a clone of the innermost one, shared by all groups over that object.
StorePlace storePlaceOf(const c10::intrusive_ptr<c10d::Store>& store);
// The same where no thread can be had, for a last word: calls block, for as long as the store takes
// to answer, and only over the client that was handed in.
StorePlace storePlaceWithoutThread(const c10::intrusive_ptr<c10d::Store>& store);

// A host's addresses, in turn. tryOne: empty where something accepts connections at the address,
// else why not; may throw StoreShortage. The answer is the first that is empty, else the last.
// Throws StoreShortage only where each try did: what lacks may be of one kind of addresses.
std::string tryEach(const std::vector<SocketAddress>& addresses,
                    const std::function<std::string(const SocketAddress&)>& tryOne);

// The address of the server behind any number of PrefixStores; false where it is no TCPStore.
bool serverAddress(const c10::intrusive_ptr<c10d::Store>& store, StoreAddress* address);

}  // namespace torchft_ext

#include "c10d/store/store_adapter.h"

#include <netdb.h>
#include <poll.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "base/shortage.h"
#include "c10d/store/store_layers.h"
#include "c10d/store/torch_store_client.h"
#include "net/socket_address.h"

namespace torchft_ext {
namespace {

// torch looks the peer's name up when it connects, which takes over 5 s where a name server does
// not answer. Callers have deadlines of their own, so this only bounds how long a thread stays with
// a server that does not answer.
constexpr std::chrono::seconds kConnectTimeout{30};
// A server that refuses connections may be about to start; after this it counts as lost. Well below
// the time after which a store thread counts as stuck.
constexpr milliseconds kRefusedFor{500};
constexpr milliseconds kRetryAfter{50};
// With one call of a lent client: well above what a newcomer costs its server, a look-up of a name
// or two of 5 s each. A connection more would cost as much again, for everyone.
constexpr std::chrono::seconds kLongestPatience{15};
// Of one try of torch's, which knows no refusal: a server may end between the look at it and this.
constexpr std::chrono::seconds kTryFor{2};

// Empty where something accepts connections at the address, else why not.
std::string tryConnect(const SocketAddress& address, Deadline deadline, UniqueFd* connection) {
  std::string error;
  int code = 0;
  UniqueFd fd = [&] {
    try {
      return startConnect(address, &error, &code);
    } catch (const std::system_error& lacking) {
      throw StoreShortage(lacking.what());
    }
  }();
  if (!fd && isShortage(code)) throw StoreShortage(error);
  if (!fd) return error;
  pollfd wanted{fd.get(), POLLOUT, 0};
  const auto patience = std::chrono::ceil<milliseconds>(deadline.remaining());
  if (::poll(&wanted, 1, static_cast<int>(patience.count())) <= 0) return "no answer";
  const int problem = pendingSocketError(fd.get());
  if (problem != 0) return std::generic_category().message(problem);
  *connection = std::move(fd);
  return {};
}

std::string tryConnect(const StoreAddress& address, Deadline deadline, UniqueFd* connection) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int problem =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  if (problem != 0)
    return std::string("its host's name does not resolve: ") + ::gai_strerror(problem);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next)
    addresses.emplace_back(entry->ai_addr, entry->ai_addrlen);
  return tryEach(addresses, [deadline, connection](const SocketAddress& one) {
    return tryConnect(one, deadline, connection);
  });
}

// torch's own client goes on trying for its whole timeout and beyond, and logs a stack trace for
// each try. Returns a connection over which nothing was sent.
UniqueFd awaitServer(const StoreAddress& address, Deadline deadline) {
  const Deadline refused = Deadline::after(kRefusedFor);
  UniqueFd connection;
  std::string why;
  bool starved = false;
  const auto look = [&] {
    starved = false;
    try {
      why = tryConnect(address, deadline, &connection);
    } catch (const StoreShortage& shortage) {
      why = shortage.what();
      starved = true;
    }
    return why.empty();
  };
  while (!look() && !refused.expired()) std::this_thread::sleep_for(kRetryAfter);
  if (starved) throw StoreShortage("cannot connect: " + why);
  // Whoever tells it names the store.
  if (!why.empty()) throw StoreError("cannot connect: " + why);
  return connection;
}

struct Connected {
  c10::intrusive_ptr<c10d::TCPStore> store;
  UniqueFd beside;  // to the same server, and silent
};

Connected connectTo(const StoreAddress& address) {
  const Deadline deadline = Deadline::after(kConnectTimeout);
  c10d::TCPStoreOptions options;
  options.port = address.port;
  options.waitWorkers = false;
  options.timeout = kTryFor;
  while (true) {
    UniqueFd beside = awaitServer(address, deadline);
    try {
      return {c10::make_intrusive<c10d::TCPStore>(address.host, options), std::move(beside)};
    } catch (const c10::Error&) {
      if (deadline.expired()) throw;
    }
  }
}

// torch's client logs a stack trace where its server has ended. So it is not asked then: the end
// shows on the silent connection. Of a call that is under way when the server ends it logs one all
// the same.
class WatchingClient final : public ComparingStore {
 public:
  explicit WatchingClient(Connected connected)
      : client_(makeStoreClient(std::move(connected.store))),
        beside_(std::move(connected.beside)) {}

  void set(const std::string& key, const std::string& value) override { client().set(key, value); }
  std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override {
    return client().getAll(keys);
  }
  void remove(const std::string& key) override { client().remove(key); }
  std::string compareSet(const std::string& key, const std::string& expected,
                         const std::string& desired) override {
    return client().compareSet(key, expected, desired);
  }
  int64_t add(const std::string& key, int64_t amount) override { return client().add(key, amount); }

 private:
  ComparingStore& client() {
    pollfd ended{beside_.get(), POLLIN, 0};  // nothing is ever sent over it
    if (::poll(&ended, 1, 0) > 0) throw StoreError("its server has closed the connection");
    return *client_;
  }

  const std::unique_ptr<ComparingStore> client_;
  const UniqueFd beside_;
};

std::string serverKey(const StoreAddress& address) {
  return address.host + ":" + std::to_string(address.port);
}

std::string identityOf(const StoreAddress& address) {
  return ":" + std::to_string(address.port);
}

// Of a store in a file, which each thread may open by itself; empty: another kind.
std::string pathOf(const StorePtr& base) {
  const auto file = storeAs<c10d::FileStore>(base);
  return file ? file->getPath() : "";
}

LentClient lend(const StorePtr& base) {
  const auto loan =
      [weak = c10::weak_intrusive_ptr<c10d::Store>(base)]() -> std::shared_ptr<StoreClient> {
    auto store = weak.lock();
    return store ? makeLentClient(std::move(store)) : nullptr;
  };
  return {loan, kLongestPatience};
}

ComparingStoreFactory factoryFor(const StoreAddress& address) {
  // The constructor looks the host up and connects, for as long as that takes: on the store thread.
  return [address] {
    return withStoreErrors([&] { return makeStoreClient(connectTo(address).store); });
  };
}

std::string unbracketed(const std::string& host) {
  return host.size() > 2 && host.front() == '[' ? host.substr(1, host.size() - 2) : host;
}

// The host as written, brackets included; empty where it is malformed.
std::string_view hostPart(std::string_view text) {
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    return end == std::string_view::npos || end == 1 ? std::string_view() : text.substr(0, end + 1);
  }
  const size_t end = text.find(':');
  return end == std::string_view::npos ? std::string_view() : text.substr(0, end);
}

std::optional<uint16_t> portOf(std::string_view text) {
  unsigned port = 0;
  const auto [stopped, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  const bool good =
      error == std::errc() && stopped == text.data() + text.size() && port > 0 && port <= 65535;
  return good ? std::optional<uint16_t>(static_cast<uint16_t>(port)) : std::nullopt;
}

struct Located {
  HostAndPort place;
  std::string_view rest;  // "/prefix", or nothing
  const char* problem = nullptr;
};

Located locate(const std::string& text) {
  const std::string_view host = hostPart(text);
  if (host.empty() || host.find_first_of("/ \t\n") != std::string_view::npos)
    return {{}, {}, "no host"};
  const std::string_view rest = std::string_view(text).substr(host.size());
  if (!rest.starts_with(':')) return {{}, {}, "no ':port' after the host"};
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::optional<uint16_t> port = portOf(rest.substr(1, slash - 1));
  if (!port) return {{}, {}, "the port is no number from 1 to 65535"};
  return {{unbracketed(std::string(host)), *port}, rest.substr(slash)};
}

}  // namespace

std::string tryEach(const std::vector<SocketAddress>& addresses,
                    const std::function<std::string(const SocketAddress&)>& tryOne) {
  std::string why;
  std::string lacking;
  for (const SocketAddress& address : addresses) {
    try {
      why = tryOne(address);
      if (why.empty()) return why;
    } catch (const StoreShortage& shortage) {
      lacking = shortage.what();
    }
  }
  if (why.empty()) throw StoreShortage(lacking);
  return why;
}

StoreAddress parseStoreAddress(const char* argument, const std::string& text) {
  const auto refuse = [&](const char* problem) {
    TORCH_CHECK_VALUE(false, argument,
                      ": expected 'host:port/prefix' or '[ipv6]:port/prefix', found '", text,
                      "': ", problem);
  };
  const Located found = locate(text);
  if (found.problem != nullptr) refuse(found.problem);
  if (!found.rest.starts_with('/')) refuse("no '/prefix' after the port");
  if (found.rest.size() == 1)
    refuse("the prefix is empty; each group and generation needs one of its own");
  return {found.place.host, found.place.port, std::string(found.rest.substr(1))};
}

HostAndPort parseHostAndPort(const char* argument, const std::string& text) {
  const Located found = locate(text);
  const char* const problem =
      found.problem == nullptr && !found.rest.empty() ? "it has a prefix" : found.problem;
  TORCH_CHECK_VALUE(problem == nullptr, argument,
                    ": expected 'host:port' or '[ipv6]:port', found '", text, "': ", problem);
  return found.place;
}

uint16_t parsePort(const char* argument, const std::string& text) {
  const std::optional<uint16_t> port = portOf(text);
  TORCH_CHECK_VALUE(port, argument, ": expected a port from 1 to 65535, found '", text, "'");
  return *port;
}

std::shared_ptr<StoreThread> storeThreadFor(const StoreAddress& address) {
  return StoreThread::forServer(serverKey(address), factoryFor(address), {}, identityOf(address));
}

ComparingStoreFactory clientsOf(const StoreAddress& address) {
  return [address]() -> std::unique_ptr<ComparingStore> {
    return withStoreErrors([&] { return std::make_unique<WatchingClient>(connectTo(address)); });
  };
}

StorePlace storePlaceOf(const c10::intrusive_ptr<c10d::Store>& store) {
  const StorePtr base = withoutPrefixes(store);
  StoreAddress address;
  if (serverAddress(store, &address)) {
    return {StoreThread::forServer(serverKey(address), factoryFor(address), lend(base),
                                   identityOf(address)),
            prefixOf(store)};
  }
  // The thread keeps the factory, and so the store: no other one has its address meanwhile.
  const std::string key = c10::str("in-process@", static_cast<const void*>(base.get()));
  const auto clone = [base] {
    // Its timeout is left alone: the clone may be the store itself, which belongs to the user.
    return withStoreErrors([&] { return makeStoreClient(base->clone()); });
  };
  auto thread = StoreThread::forServer(key, clone, {}, pathOf(base));
  return {std::move(thread), prefixOf(store)};
}

StorePlace storePlaceWithoutThread(const c10::intrusive_ptr<c10d::Store>& store) {
  const StorePtr base = withoutPrefixes(store);
  const bool is_tcp = storeAs<c10d::TCPStore>(base) != nullptr;
  auto client = [base, is_tcp] { return is_tcp ? makeLentClient(base) : makeStoreClient(base); };
  return {StoreThread::onCaller("the group's store", std::move(client)), prefixOf(store)};
}

bool serverAddress(const c10::intrusive_ptr<c10d::Store>& store, StoreAddress* address) {
  const auto tcp = storeAs<c10d::TCPStore>(withoutPrefixes(store));
  if (!tcp) return false;
  address->host = tcp->getHost();
  address->port = tcp->getPort();
  return true;
}

}  // namespace torchft_ext

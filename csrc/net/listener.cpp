#include "net/listener.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/shortage.h"
#include "base/task_thread.h"
#include "net/local_address.h"
#include "net/pending_connections.h"

namespace torchft_ext {
namespace {

// so that a flood of strangers does not hold up admitted connections
constexpr int kAcceptsPerTurn = 16;
constexpr milliseconds kPauseWithoutDescriptors{100};
constexpr std::chrono::seconds kOpenWithin{30};
constexpr std::chrono::minutes kBetweenWarnings{1};
constexpr rlim_t kStrangersShare = 8;  // of the limit of open files, one part in so many
constexpr rlim_t kParkedShare = 4;

// None where the name is taken, or where a sandbox knows no Unix sockets.
std::optional<ListeningSocket> listenLocally(const SocketAddress& address) {
  try {
    return listenOn(address, PortRange{}, nullptr);
  } catch (const std::system_error&) {
    return std::nullopt;
  }
}

// accept(2) asks for a descriptor before it looks whether there is a connection.
bool somebodyWaits(int listener_fd) {
  pollfd wanted{listener_fd, POLLIN, 0};
  return ::poll(&wanted, 1, 0) == 1;
}

size_t capacity(int most, rlim_t share) {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) return static_cast<size_t>(most);
  return static_cast<size_t>(std::clamp<rlim_t>(files.rlim_cur / share, 1, most));
}

}  // namespace

struct Listener::AtomicCounts {
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> admitted{0};
  std::atomic<uint64_t> admitted_locally{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> parked{0};
};

// Loop thread only. Owned by the handlers of its listening sockets, and by each handler or timer
// while that runs.
struct Listener::Impl : std::enable_shared_from_this<Impl> {
  struct Generation {
    GenerationSecret secret;
    std::shared_ptr<const Handler> handler;
    Starved starved;  // null: nobody is to be told, or has been
    Clock::time_point since = Clock::now();
  };
  using Pending = PendingConnections::Pending;
  using Place = PendingConnections::Place;

  Impl(EventLoop& event_loop, std::vector<ListeningSocket> listening, const Incarnation& self);

  void start();
  void close();
  void expect(const Nonce& nonce, const GenerationSecret& secret, Handler handler, Starved starved);

  std::vector<SocketAddress> addresses() const;
  void acceptSome(const ListeningSocket& listening_socket);
  void pauseAccepting(const ListeningSocket& listening_socket, int error);
  void tellStarved(const std::string& why);
  void listenTo(uint32_t events);
  void letIn(UniqueFd fd, bool local);
  void closeElsewhere(UniqueFd fd);
  void closeLocalSocket();
  void receive(UniqueFd fd, bool local);
  void readHello(Place place);
  void judge(Pending pending);
  void park(Pending pending);
  void admit(Pending pending, const Generation& generation);
  void refuse(const Pending& pending, RefusalCode code, const std::string& reason);
  bool callHandler(const Handler& handler, Arrival& arrival) noexcept;

  EventLoop& loop;
  const Incarnation incarnation;  // of the process, or of the one that a test plays
  std::vector<ListeningSocket>
      listening_sockets;  // in the order of addresses(); some or all without descriptor
  std::unique_ptr<TaskThread> porter;  // null: not needed so far
  const std::shared_ptr<std::atomic<int>> turned_away = std::make_shared<std::atomic<int>>(0);
  const std::shared_ptr<AtomicCounts> counts = std::make_shared<AtomicCounts>();
  bool closed = false;
  EventLoop::TimerId pause = 0;
  Clock::time_point next_warning{};
  std::optional<Clock::time_point> lacking_since;
  PendingConnections strangers;
  PendingConnections parked;
  std::map<Nonce, Generation> generations;
};

Listener::Impl::Impl(EventLoop& event_loop, std::vector<ListeningSocket> listening,
                     const Incarnation& self)
    : loop(event_loop),
      incarnation(self),
      listening_sockets(std::move(listening)),
      strangers(
          event_loop, capacity(kMaxStrangers, kStrangersShare), kHelloWithin,
          [this](const Pending&) { ++counts->refused; }, [this] { return shared_from_this(); }),
      parked(
          event_loop, capacity(kMaxParked, kParkedShare), kParkedFor,
          [this](const Pending& pending) {
            counts->parked = parked.connections().size();
            refuse(pending, RefusalCode::kUnknownGeneration,
                   "this process does not know that generation");
          },
          [this] { return shared_from_this(); }) {}

void Listener::Impl::start() {
  for (size_t i = 0; i < listening_sockets.size(); ++i) {
    loop.watch(listening_sockets[i].fd.get(), EPOLLIN, [self = shared_from_this(), i](uint32_t) {
      self->acceptSome(self->listening_sockets[i]);
    });
  }
}

std::vector<SocketAddress> Listener::Impl::addresses() const {
  std::vector<SocketAddress> all;
  all.reserve(listening_sockets.size());
  for (const ListeningSocket& listening_socket : listening_sockets)
    all.push_back(listening_socket.address);
  return all;
}

void Listener::Impl::close() {
  if (std::exchange(closed, true)) return;
  const auto self = shared_from_this();
  loop.cancel(pause);
  // a call from one of them may be under way
  for (ListeningSocket& listening_socket : listening_sockets) {
    if (listening_socket.fd) loop.unwatch(listening_socket.fd.get());
    listening_socket.fd.reset();
  }
  strangers.clear();
  parked.clear();
  const auto ended = std::exchange(generations, {});
}

void Listener::Impl::acceptSome(const ListeningSocket& listening_socket) {
  for (int i = 0; i < kAcceptsPerTurn && listening_socket.fd; ++i) {
    UniqueFd fd = acceptOne(listening_socket.fd.get());
    const int error = errno;
    if (!fd && error != EAGAIN && error != EWOULDBLOCK && somebodyWaits(listening_socket.fd.get()))
      return pauseAccepting(listening_socket, error);
    lacking_since.reset();
    if (!fd) return;
    letIn(std::move(fd), listening_socket.address.isLocal());
    if (turned_away->load() > kMaxTurnedAway) closeLocalSocket();
  }
}

void Listener::Impl::letIn(UniqueFd fd, bool local) {
  ++counts->accepted;
  if (!local || isOfOwnUser(fd.get())) return receive(std::move(fd), local);
  ++counts->refused;
  closeElsewhere(std::move(fd));
}

void Listener::Impl::listenTo(uint32_t events) {
  for (const ListeningSocket& listening_socket : listening_sockets) {
    if (listening_socket.fd) loop.modify(listening_socket.fd.get(), events);
  }
}

void Listener::Impl::closeElsewhere(UniqueFd fd) {
  if (!porter) porter = std::make_unique<TaskThread>("ft-porter");
  ++*turned_away;
  const auto held = std::make_shared<UniqueFd>(std::move(fd));
  porter->post([held, count = turned_away] {
    held->reset();
    --*count;
  });
}

// Peers that find it closed take TCP; those that wait at it come in.
void Listener::Impl::closeLocalSocket() {
  for (ListeningSocket& listening_socket : listening_sockets) {
    if (!listening_socket.fd || !listening_socket.address.isLocal()) continue;
    const UniqueFd closing = std::move(listening_socket.fd);
    loop.unwatch(closing.get());
    ::shutdown(closing.get(), SHUT_RDWR);
    while (!closed) {  // a handler of who comes in may destroy the listener
      UniqueFd waiting = acceptOne(closing.get());
      if (!waiting) break;
      letIn(std::move(waiting), true);
    }
    log(LogLevel::kWarning,
        "another user's processes hold up the closing of their connections to " +
            listening_socket.address.toString() +
            ": connections within this host go through TCP from now on");
  }
}

// The connection stays in the kernel's queue and the socket readable: without a pause the loop
// would spin.
void Listener::Impl::pauseAccepting(const ListeningSocket& listening_socket, int error) {
  listenTo(0);
  loop.cancel(pause);
  pause = loop.runAt(Clock::now() + kPauseWithoutDescriptors, [self = shared_from_this()] {
    self->pause = 0;
    self->listenTo(EPOLLIN);
  });
  const Clock::time_point now = Clock::now();
  if (!lacking_since) lacking_since = now;
  if (now < next_warning && now - *lacking_since < kLacksFor) return;
  const std::string why = "cannot accept connections on " + listening_socket.address.toString() +
                          ": " + std::error_code(error, std::generic_category()).message() +
                          shortageNumbers(error);
  if (now >= next_warning) {
    next_warning = now + kBetweenWarnings;
    log(LogLevel::kWarning, why + "; trying again every 0.1 s");
  }
  tellStarved(why);
}

void Listener::Impl::tellStarved(const std::string& why) {
  std::vector<Starved> told;  // the calls may forget generations
  for (auto& [nonce, generation] : generations) {
    if (generation.starved &&
        Clock::now() - std::max(generation.since, *lacking_since) >= kLacksFor)
      told.push_back(std::exchange(generation.starved, nullptr));
  }
  for (const Starved& starved : told) starved(why);
}

void Listener::Impl::receive(UniqueFd fd, bool local) {
  Pending pending;
  pending.fd = std::move(fd);
  pending.local = local;
  const Place place = strangers.add(std::move(pending));
  loop.watch(place->fd.get(), EPOLLIN,
             [self = shared_from_this(), place](uint32_t) { self->readHello(place); });
  readHello(place);  // as a rule it has arrived with the connection
}

void Listener::Impl::readHello(Place place) {
  using State = FrameInbox::State;
  const State state = place->inbox.readFrom(place->fd.get());
  if (state == State::kMore) return;
  Pending pending = strangers.remove(place);
  if (state == State::kWhole) {
    judge(std::move(pending));
  } else if (state == State::kWrongVersion) {
    refuse(pending, RefusalCode::kWrongVersion, pending.inbox.why());
  } else {
    ++counts->refused;
  }
}

void Listener::Impl::judge(Pending pending) {
  const auto hello = decodeHello(pending.inbox.payload());
  if (!hello) {
    ++counts->refused;
    return;
  }
  pending.hello = *hello;
  const bool to_whoever_listens = hello->to.isZero();
  if (!to_whoever_listens && hello->to != incarnation) {
    refuse(pending, RefusalCode::kWrongProcess, "another process has taken over this port");
    return;
  }
  const auto found = generations.find(hello->nonce);
  if (found != generations.end()) {
    // a copy: the handler may forget the generation
    admit(std::move(pending), Generation(found->second));
  } else if (hello->nonce.isZero()) {
    refuse(pending, RefusalCode::kUnknownGeneration, "this process lives");  // a Probe asks
  } else if (to_whoever_listens) {
    refuse(pending, RefusalCode::kUnknownGeneration, "another process listens there");
  } else {
    park(std::move(pending));
  }
}

void Listener::Impl::park(Pending pending) {
  const Place place = parked.add(std::move(pending));
  // It has nothing to say before it is welcomed: whatever comes means that it has gone, or is no
  // peer.
  loop.watch(place->fd.get(), EPOLLIN | EPOLLRDHUP, [self = shared_from_this(), place](uint32_t) {
    self->parked.remove(place);
    self->counts->parked = self->parked.connections().size();
    ++self->counts->refused;
  });
  counts->parked = parked.connections().size();
}

void Listener::Impl::admit(Pending pending, const Generation& generation) {
  const Hello& hello = pending.hello;
  if (!equalInConstantTime(hello.proof.bytes, generation.secret.connector.bytes)) {
    refuse(pending, RefusalCode::kWrongSecret, "the generation's secret is another one");
    return;
  }
  if (!sendWhole(pending.fd.get(), encodeWelcome({generation.secret.acceptor, incarnation}))) {
    ++counts->refused;
    return;
  }
  Arrival arrival{std::move(pending.fd), hello.rank, hello.channel, hello.from};
  if (callHandler(*generation.handler, arrival)) {
    ++counts->admitted;
    if (pending.local) ++counts->admitted_locally;
    return;
  }
  pending.fd = std::move(arrival.fd);
  refuse(pending, RefusalCode::kDuplicate,
         "the generation does not take that rank and channel, or has it already");
}

bool Listener::Impl::callHandler(const Handler& handler, Arrival& arrival) noexcept {
  try {
    return handler(arrival);
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("admitting a connection of a peer threw: ") + error.what());
  } catch (...) {
    log(LogLevel::kError, "admitting a connection of a peer threw");
  }
  return false;
}

void Listener::Impl::refuse(const Pending& pending, RefusalCode code, const std::string& reason) {
  ++counts->refused;
  if (pending.fd) sendWhole(pending.fd.get(), encodeRefusal({code, reason}));
}

void Listener::Impl::expect(const Nonce& nonce, const GenerationSecret& secret, Handler handler,
                            Starved starved) {
  generations[nonce] =
      Generation{secret, std::make_shared<const Handler>(std::move(handler)), std::move(starved)};
  std::vector<Pending> waiting;
  for (Place place = parked.connections().begin(); place != parked.connections().end();) {
    const Place current = place++;
    if (current->hello.nonce == nonce) waiting.push_back(parked.remove(current));
  }
  counts->parked = parked.connections().size();
  for (Pending& pending : waiting) {
    if (closed) return;
    const auto found = generations.find(nonce);
    if (found == generations.end()) {
      park(std::move(pending));  // a handler has forgotten the generation
    } else {
      admit(std::move(pending), Generation(found->second));
    }
  }
}

std::shared_ptr<Listener> Listener::open(EventLoop& loop, const SocketAddress& address,
                                         PortRange ports, std::string* error,
                                         const Incarnation& self,
                                         const std::optional<SocketAddress>& local) {
  struct Opening {  // shared with the loop, which may come to it too late
    std::string error;
    std::shared_ptr<Listener> listener;
  };
  auto opening = std::make_shared<Opening>();
  const auto open = [opening, &loop, address, ports, self, local] {
    try {
      std::vector<ListeningSocket> listening_sockets;
      if (auto listening = local ? listenLocally(*local) : std::nullopt)
        listening_sockets.push_back(std::move(*listening));
      auto listening = listenOn(address, ports, &opening->error);
      if (!listening) return;
      listening_sockets.push_back(std::move(*listening));
      auto impl = std::make_shared<Impl>(loop, std::move(listening_sockets), self);
      impl->start();
      opening->listener.reset(new Listener(loop, impl));
    } catch (const std::system_error& refused) {
      opening->error = "cannot listen on " + address.ip() + ": " + refused.what();
    }
  };
  if (!loop.runOnLoop(open, Deadline::after(kOpenWithin))) {
    if (error != nullptr)
      *error = "cannot listen on " + address.ip() + ": the event loop does not answer";
    return nullptr;
  }
  if (opening->listener == nullptr && error != nullptr) *error = opening->error;
  return std::move(opening->listener);
}

Listener::Listener(EventLoop& loop, const std::shared_ptr<Impl>& impl)
    : loop_(loop), addresses_(impl->addresses()), counts_(impl->counts), impl_(impl) {}

Listener::~Listener() {
  const auto close = [weak = impl_] {
    if (const auto impl = weak.lock()) impl->close();
  };
  if (loop_.inLoop()) {
    close();
  } else {
    loop_.post(close);  // false: the loop has ended, or is ending, and takes Impl with it
  }
}

void Listener::expect(const Nonce& nonce, const GenerationSecret& secret, Handler handler,
                      Starved starved) {
  if (const auto impl = impl_.lock())
    impl->expect(nonce, secret, std::move(handler), std::move(starved));
}

void Listener::forget(const Nonce& nonce) {
  const auto impl = impl_.lock();
  if (impl == nullptr) return;
  const auto found = impl->generations.find(nonce);
  if (found == impl->generations.end()) return;
  const Impl::Generation ended = std::move(found->second);  // what its handler holds may end here
  impl->generations.erase(found);
}

Listener::Counts Listener::counts() const {
  return {counts_->accepted, counts_->admitted, counts_->admitted_locally, counts_->refused,
          counts_->parked};
}

}  // namespace torchft_ext

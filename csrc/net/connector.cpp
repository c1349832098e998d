#include "net/connector.h"

#include <sys/epoll.h>

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "base/shortage.h"
#include "net/frame_inbox.h"
#include "net/local_address.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {
namespace {

// Of a TCP address, and only where another one is left to try: a packet filter that swallows
// connections must not cost the whole deadline. The answer may take longer, since the acceptor
// parks us until its generation begins.
constexpr std::chrono::seconds kConnectWithin{2};
constexpr std::chrono::seconds kAnswerWithin{10};
constexpr milliseconds kLongestPause{50};

// A connection to a free local port of the ephemeral range can meet itself.
bool isConnectedToItself(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* raw = reinterpret_cast<sockaddr*>(&storage);
  const auto local = localAddressOfSocket(fd);
  return local && ::getpeername(fd, raw, &length) == 0 && *local == SocketAddress(raw, length);
}

}  // namespace

// Loop thread only. Owned by its timers and handlers: while it works there is at least one of them.
struct Connector::Impl : std::enable_shared_from_this<Impl> {
  struct Target {
    SocketAddress address;
    bool given_up = false;
  };
  struct ConnectState {
    UniqueFd fd;
    bool connected = false;
    FrameInbox inbox{{FrameType::kWelcome, FrameType::kRefused}};
    EventLoop::TimerId limit = 0;
  };

  Impl(EventLoop& event_loop, const std::vector<SocketAddress>& addresses, const Hello& said,
       Welcome answer, Deadline until, Callback done,
       std::shared_ptr<std::atomic<bool>> cancelled_flag);

  void start();
  void tryNext();
  void beginAttempt(const SocketAddress& address);
  void onEvents();
  void onConnected();
  void onAnswer();
  void judgeRefusal();
  void tryAgain(const std::string& why);
  void lacks(const std::string& why);
  void nextAfter(const std::string& why);
  void askAgainLater(const std::string& why);
  void giveUpAddress(const std::string& why);
  void limitAttempt(Duration limit);
  void endAttempt();
  void scheduleNext(Duration pause);
  void onDeadline();
  void succeed();
  void finish(Result result);
  void cancel();

  size_t addressesLeft() const {
    return static_cast<size_t>(std::count_if(
        targets.begin(), targets.end(), [](const Target& target) { return !target.given_up; }));
  }
  bool anotherTcpAddressLeft() const {
    for (size_t i = 0; i < targets.size(); ++i) {
      if (i != current && !targets[i].given_up && !targets[i].address.isLocal()) return true;
    }
    return false;
  }
  std::string currentName() const { return targets[current].address.toString(); }

  EventLoop& loop;
  std::vector<Target> targets;
  const int rank;
  const std::string hello;
  const Welcome expected;
  const Deadline deadline;
  const Clock::time_point began = Clock::now();
  Callback callback;
  const std::shared_ptr<std::atomic<bool>> cancelled;

  bool finished = false;
  size_t current = 0;
  size_t tried_in_round = 0;
  int attempts = 0;
  milliseconds pause{1};
  ConnectState attempt;
  EventLoop::TimerId next_timer = 0;
  EventLoop::TimerId deadline_timer = 0;
  std::string last_error = "no attempt was made";
  std::optional<Clock::time_point> lacking_since;
};

Connector::Impl::Impl(EventLoop& event_loop, const std::vector<SocketAddress>& addresses,
                      const Hello& said, Welcome answer, Deadline until, Callback done,
                      std::shared_ptr<std::atomic<bool>> cancelled_flag)
    : loop(event_loop),
      rank(said.rank),
      hello(encodeHello(said)),
      expected(answer),
      deadline(until),
      callback(std::move(done)),
      cancelled(std::move(cancelled_flag)) {
  for (const SocketAddress& address : addresses) {
    if (isReachableFromHere(address)) targets.push_back({address});
  }
}

void Connector::Impl::start() {
  if (!deadline.isNever()) {
    deadline_timer = loop.runAt(deadline.at(), [self = shared_from_this()] { self->onDeadline(); });
  }
  current = targets.empty() ? 0 : targets.size() - 1;  // the next one is the first
  if (targets.empty()) {
    last_error = "the peer has published no address that can be reached from here";
    scheduleNext(Duration::zero());
  } else {
    tryNext();
  }
}

void Connector::Impl::tryNext() {
  next_timer = 0;
  if (addressesLeft() == 0) {
    finish({UniqueFd(), last_error, false});
    return;
  }
  do {
    current = (current + 1) % targets.size();
  } while (targets[current].given_up);
  ++tried_in_round;
  ++attempts;
  beginAttempt(targets[current].address);
}

void Connector::Impl::beginAttempt(const SocketAddress& address) {
  try {
    std::string error;
    int code = 0;
    attempt.fd = startConnect(address, &error, &code);
    if (!attempt.fd) return isShortage(code) ? lacks(error) : tryAgain(error);
    loop.watch(attempt.fd.get(), EPOLLOUT,
               [self = shared_from_this()](uint32_t) { self->onEvents(); });
    lacking_since.reset();
  } catch (const std::system_error& refused) {
    return lacks("cannot connect to " + currentName() + ": " + refused.what());
  }
  limitAttempt(kConnectWithin);
}

void Connector::Impl::onEvents() {
  if (attempt.connected) {
    onAnswer();
  } else {
    onConnected();
  }
}

void Connector::Impl::onConnected() {
  const int error = pendingSocketError(attempt.fd.get());
  if (error != 0) {
    const std::string text = std::error_code(error, std::generic_category()).message();
    tryAgain("cannot connect to " + currentName() + ": " + text);
  } else if (isConnectedToItself(attempt.fd.get())) {
    tryAgain("nobody listens on " + currentName());
  } else if (targets[current].address.isLocal() && !isOfOwnUser(attempt.fd.get())) {
    giveUpAddress(currentName() + " is another user's");
  } else if (!sendWhole(attempt.fd.get(), hello)) {
    tryAgain("the connection to " + currentName() + " broke");
  } else {
    attempt.connected = true;
    loop.modify(attempt.fd.get(), EPOLLIN);
    limitAttempt(kAnswerWithin);
  }
}

void Connector::Impl::onAnswer() {
  using State = FrameInbox::State;
  switch (attempt.inbox.readFrom(attempt.fd.get())) {
    case State::kMore:
      return;
    case State::kClosed:
      tryAgain(currentName() + " ended the connection: " + attempt.inbox.why());
      return;
    case State::kWrongVersion:
    case State::kBad:
      giveUpAddress(currentName() + " is no peer of ours: " + attempt.inbox.why());
      return;
    case State::kWhole:
      break;
  }
  if (attempt.inbox.header().type == FrameType::kRefused) {
    judgeRefusal();
    return;
  }
  const auto welcome = decodeWelcome(attempt.inbox.payload());
  if (!welcome || !equalInConstantTime(welcome->proof.bytes, expected.proof.bytes)) {
    giveUpAddress(currentName() + " does not know the generation's secret");
  } else if (welcome->from != expected.from) {
    giveUpAddress(currentName() + " is another process: expected incarnation " +
                  expected.from.hex() + ", found " + welcome->from.hex());
  } else {
    succeed();
  }
}

void Connector::Impl::judgeRefusal() {
  const auto refusal = decodeRefusal(attempt.inbox.payload());
  const std::string why = currentName() + " refused: " + (refusal ? refusal->reason : "malformed");
  if (refusal && refusal->code == RefusalCode::kUnknownGeneration) {
    askAgainLater(why);
  } else {
    giveUpAddress(why);
  }
}

void Connector::Impl::tryAgain(const std::string& why) {
  lacking_since.reset();
  nextAfter(why);
}

// There may be one later.
void Connector::Impl::lacks(const std::string& why) {
  if (!lacking_since) lacking_since = Clock::now();
  if (Clock::now() - *lacking_since >= kLacksFor) return finish({UniqueFd(), why, false, true});
  nextAfter(why);
}

void Connector::Impl::nextAfter(const std::string& why) {
  last_error = why;
  endAttempt();
  if (tried_in_round < addressesLeft()) {
    scheduleNext(Duration::zero());
    return;
  }
  tried_in_round = 0;
  scheduleNext(pause);
  pause = std::min(2 * pause, kLongestPause);
}

// It is who we look for, and another address of it would say the same.
void Connector::Impl::askAgainLater(const std::string& why) {
  last_error = why;
  endAttempt();
  tried_in_round = 0;
  current = (current + targets.size() - 1) % targets.size();
  scheduleNext(pause);
  pause = std::min(2 * pause, kLongestPause);
}

void Connector::Impl::giveUpAddress(const std::string& why) {
  last_error = why;
  endAttempt();
  targets[current].given_up = true;
  if (tried_in_round > 0) --tried_in_round;
  scheduleNext(Duration::zero());
}

void Connector::Impl::limitAttempt(Duration limit) {
  loop.cancel(std::exchange(attempt.limit, 0));
  if (targets[current].address.isLocal() || !anotherTcpAddressLeft()) return;
  attempt.limit = loop.runAt(Clock::now() + limit, [self = shared_from_this()] {
    self->attempt.limit = 0;
    self->tryAgain(self->currentName() + " does not answer");
  });
}

void Connector::Impl::endAttempt() {
  loop.cancel(attempt.limit);
  if (attempt.fd) loop.unwatch(attempt.fd.get());
  attempt = ConnectState();
}

void Connector::Impl::scheduleNext(Duration after) {
  next_timer = loop.runAt(Clock::now() + after, [self = shared_from_this()] { self->tryNext(); });
}

void Connector::Impl::onDeadline() {
  deadline_timer = 0;
  std::string state = last_error;
  if (attempt.connected)
    state = currentName() + " has accepted the connection and not answered yet";
  finish({UniqueFd(),
          "no connection after " + formatSeconds(Clock::now() - began) + " and " +
              std::to_string(attempts) + " attempts: " + state,
          true});
}

void Connector::Impl::succeed() {
  loop.unwatch(attempt.fd.get());
  finish({std::move(attempt.fd), "", false});
}

void Connector::Impl::finish(Result result) {
  const auto self = shared_from_this();
  Callback done = std::exchange(callback, nullptr);
  cancel();
  if (done != nullptr && !*cancelled) done(std::move(result));
}

void Connector::Impl::cancel() {
  if (std::exchange(finished, true)) return;
  const auto self = shared_from_this();
  endAttempt();
  loop.cancel(next_timer);
  loop.cancel(deadline_timer);
  const Callback ended = std::exchange(callback, nullptr);
}

Connector::Connector(EventLoop& loop, const std::vector<SocketAddress>& addresses, Hello hello,
                     Welcome expected, Deadline deadline, Callback callback)
    : loop_(loop), cancelled_(std::make_shared<std::atomic<bool>>(false)) {
  const auto impl = std::make_shared<Impl>(loop, addresses, hello, expected, deadline,
                                           std::move(callback), cancelled_);
  impl_ = impl;
  impl->start();
}

Connector::~Connector() {
  *cancelled_ = true;
  const auto cancel = [weak = impl_] {
    if (const auto impl = weak.lock()) impl->cancel();
  };
  if (loop_.inLoop()) {
    cancel();
  } else {
    loop_.post(cancel);  // false: the loop has ended, or is ending, and takes Impl with it
  }
}

}  // namespace torchft_ext

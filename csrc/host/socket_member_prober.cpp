#include "host/socket_member_prober.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "base/mutex.h"
#include "liveness/liveness_kind.h"
#include "liveness/process_state.h"
#include "net/dial.h"
#include "net/local_address.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {
namespace {

// A generation that forms as fast as usual is over by then, and costs no probe: where there are
// more ranks than cores, those of all members would slow it down.
constexpr milliseconds kFirstAsk{15};
constexpr milliseconds kInterval{25};
constexpr int kMostPerSecond = 400;
// A dying process resets connections just before it refuses them.
constexpr milliseconds kAskAgain{1};
constexpr std::chrono::seconds kLongestConnect{2};
constexpr std::chrono::hours kKeeper{1};  // renewed

// What the loop tells the thread in configure().
class Mailbox {
 public:
  void put(MemberProber::Report report) {
    MutexLock lock(mutex_);
    reports_.push_back(std::move(report));
    updates_.store(true, std::memory_order_release);
  }
  bool hasUpdates() const { return updates_.load(std::memory_order_acquire); }
  std::vector<MemberProber::Report> take() {
    MutexLock lock(mutex_);
    updates_.store(false, std::memory_order_release);
    return std::exchange(reports_, {});
  }

 private:
  Mutex mutex_;
  std::vector<MemberProber::Report> reports_ GUARDED_BY(mutex_);
  std::atomic<bool> updates_{false};  // written under mutex_
};

// Loop thread only, but for construction. Kept by a timer of the loop from start() to stop(), so
// that it always ends there.
class Rounds : public std::enable_shared_from_this<Rounds> {
 public:
  Rounds(EventLoop& loop, MemberProberOptions options, std::shared_ptr<Mailbox> mailbox)
      : loop_(loop), options_(std::move(options)), mailbox_(std::move(mailbox)) {}

  void start();
  void watch(const std::vector<MemberRecord>& members);
  void stop();

 private:
  struct Target {
    std::string host;
    int64_t pid = -1;
    std::vector<SocketAddress> addresses;
    size_t next_address = 0;
    std::unique_ptr<Dial> dial;
    Clock::time_point asked;
    std::optional<Clock::time_point> failing_since;  // neither an answer nor a refusal
    std::optional<Liveness> liveness;
    EventLoop::TimerId timer = 0;
  };

  void drop(Target& target);
  void askLater(const Incarnation& id, Duration pause);
  void ask(const Incarnation& id);
  void onEnd(const Incarnation& id, const Dial::Result& result);
  void onTrouble(const Incarnation& id, const Dial::Result& result);
  void see(const Incarnation& id, Liveness liveness, std::string how);
  std::string describeSilence(const Target& target) const;
  Duration connectPatience() const;
  Duration interval() const;

  EventLoop& loop_;
  const MemberProberOptions options_;
  const std::shared_ptr<Mailbox> mailbox_;
  std::map<Incarnation, Target> targets_;
  EventLoop::TimerId keeper_ = 0;
};

void Rounds::start() {
  keeper_ = loop_.runAt(Clock::now() + kKeeper, [self = shared_from_this()] { self->start(); });
}

void Rounds::watch(const std::vector<MemberRecord>& members) {
  std::map<Incarnation, Target> kept;
  for (const MemberRecord& member : members) {
    if (member.incarnation == options_.self) continue;
    const auto known = targets_.find(member.incarnation);
    if (known != targets_.end()) {
      kept.insert(targets_.extract(known));
      continue;
    }
    Target target;
    target.host = member.host;
    target.pid = member.pid;
    target.addresses = withoutLocal(member.liveness_addresses.empty() ? member.addresses
                                                                      : member.liveness_addresses);
    if (!target.addresses.empty()) kept.emplace(member.incarnation, std::move(target));
  }
  for (auto& [id, target] : targets_) drop(target);
  targets_ = std::move(kept);
  for (auto& [id, target] : targets_) {
    const bool fresh = !target.dial && target.timer == 0 && !target.liveness;
    if (fresh) askLater(id, kFirstAsk);
  }
}

void Rounds::stop() {
  for (auto& [id, target] : targets_) drop(target);
  targets_.clear();
  loop_.cancel(std::exchange(keeper_, 0));
}

void Rounds::drop(Target& target) {
  target.dial.reset();
  loop_.cancel(std::exchange(target.timer, 0));
}

Duration Rounds::interval() const {
  return std::max<Duration>(kInterval, std::chrono::seconds(options_.world) / kMostPerSecond);
}

Duration Rounds::connectPatience() const {
  const bool beats = options_.heartbeat_limit > Duration::zero();
  return beats ? std::min<Duration>(options_.heartbeat_limit, kLongestConnect) : kLongestConnect;
}

void Rounds::askLater(const Incarnation& id, Duration pause) {
  targets_.at(id).timer = loop_.runAt(Clock::now() + pause, [this, id] { ask(id); });
}

void Rounds::ask(const Incarnation& id) {
  Target& target = targets_.at(id);
  target.timer = 0;
  target.asked = Clock::now();
  const size_t address = target.next_address++ % target.addresses.size();
  const Hello hello = lifeQuestion(options_.self, id, static_cast<uint8_t>(LivenessKind::kMain));
  const bool beats = options_.heartbeat_limit > Duration::zero();
  target.dial = std::make_unique<Dial>(
      loop_, target.addresses[address], hello, Welcome{{}, id}, Deadline::after(connectPatience()),
      beats ? options_.heartbeat_limit : Duration(-1),
      [this, id](const Dial::Result& result) { onEnd(id, result); });
}

void Rounds::onEnd(const Incarnation& id, const Dial::Result& result) {
  Target& target = targets_.at(id);
  const std::unique_ptr<Dial> spent = std::move(target.dial);
  const std::optional<Liveness> shown = livenessShownBy(result);
  if (!shown) return onTrouble(id, result);
  if (*shown == Liveness::kGone) return see(id, *shown, "its process ended");
  see(id, *shown, *shown == Liveness::kSilent ? describeSilence(target) : std::string());
  target.failing_since.reset();
  askLater(id, interval());
}

void Rounds::onTrouble(const Incarnation& id, const Dial::Result& result) {
  Target& target = targets_.at(id);
  if (result.end == Dial::End::kNoSocket) return askLater(id, interval());
  // A connection that broke had reached the host; how long it stood may be how long this process
  // was stopped meanwhile.
  const bool connected = result.end == Dial::End::kBroken;
  if (!target.failing_since) target.failing_since = connected ? Clock::now() : target.asked;
  if (Clock::now() - *target.failing_since < connectPatience()) return askLater(id, kAskAgain);
  see(id, Liveness::kUnreachable, "its host cannot be reached");
  askLater(id, interval());
}

void Rounds::see(const Incarnation& id, Liveness liveness, std::string how) {
  Target& target = targets_.at(id);
  if (target.liveness == liveness) return;
  target.liveness = liveness;
  mailbox_->put({id, liveness, std::move(how)});
}

std::string Rounds::describeSilence(const Target& target) const {
  std::string how =
      "its process has not answered for " + formatSeconds(Clock::now() - target.asked);
  if (target.host != options_.host) return how;
  const std::string state = describeProcessState(target.pid);
  return state.empty() ? how : how + " (" + state + ")";
}

class SocketMemberProber final : public MemberProber {
 public:
  SocketMemberProber(EventLoop& loop, const MemberProberOptions& options)
      : loop_(loop), mailbox_(std::make_shared<Mailbox>()) {
    auto rounds = std::make_shared<Rounds>(loop, options, mailbox_);
    rounds_ = rounds;
    loop_.post([rounds = std::move(rounds)] { rounds->start(); });
  }
  ~SocketMemberProber() override {
    tell([](Rounds& rounds) { rounds.stop(); });
  }
  SocketMemberProber(const SocketMemberProber&) = delete;
  SocketMemberProber& operator=(const SocketMemberProber&) = delete;

  void watch(std::vector<MemberRecord> members) override {
    tell([members = std::move(members)](Rounds& rounds) { rounds.watch(members); });
  }
  bool hasUpdates() const override { return mailbox_->hasUpdates(); }
  std::vector<Report> updates() override { return mailbox_->take(); }

 private:
  void tell(std::function<void(Rounds&)> call) {
    loop_.post([weak = rounds_, call = std::move(call)] {
      if (const auto rounds = weak.lock()) call(*rounds);
    });
  }

  EventLoop& loop_;
  const std::shared_ptr<Mailbox> mailbox_;
  std::weak_ptr<Rounds> rounds_;  // locked on the loop alone
};

}  // namespace

std::unique_ptr<MemberProber> makeSocketMemberProber(EventLoop& loop,
                                                     const MemberProberOptions& options) {
  return std::make_unique<SocketMemberProber>(loop, options);
}

}  // namespace torchft_ext

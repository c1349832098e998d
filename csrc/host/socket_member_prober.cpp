#include "host/socket_member_prober.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "base/mutex.h"
#include "liveness/liveness_kind.h"
#include "liveness/process_state.h"
#include "net/local_address.h"
#include "net/probe.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {
namespace {

// A generation that forms as fast as usual is over by then, and costs no probe: where there are
// more ranks than cores, those of all members would slow it down.
constexpr milliseconds kFirstAsk{15};
constexpr milliseconds kInterval{25};
constexpr int kMostPerSecond = 400;
constexpr milliseconds kFirstPause{1};  // after a connection that says nothing; then doubled
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
    std::vector<SocketAddress> addresses;  // the next one first
    std::unique_ptr<Probe> probe;
    std::optional<Liveness> liveness;
    EventLoop::TimerId timer = 0;
  };

  void drop(Target& target);
  void askLater(const Incarnation& id, Duration pause);
  void ask(const Incarnation& id);
  void onAnswer(const Incarnation& id, const ProbeAnswer& answer);
  void see(const Incarnation& id, const ProbeAnswer& answer);
  std::string describe(const Target& target, const ProbeAnswer& answer) const;
  ProbePatience patience() const;
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
    const bool fresh = !target.probe && target.timer == 0 && !target.liveness;
    if (fresh) askLater(id, kFirstAsk);
  }
}

void Rounds::stop() {
  for (auto& [id, target] : targets_) drop(target);
  targets_.clear();
  loop_.cancel(std::exchange(keeper_, 0));
}

void Rounds::drop(Target& target) {
  target.probe.reset();
  loop_.cancel(std::exchange(target.timer, 0));
}

Duration Rounds::interval() const {
  return std::max<Duration>(kInterval,
                            Duration(std::chrono::seconds(options_.world)) / kMostPerSecond);
}

// Something may cut connections, so one that ends without a word is no answer here: if a process
// ends, the next one is refused.
ProbePatience Rounds::patience() const {
  const bool beats = options_.heartbeat_limit > Duration::zero();
  ProbePatience patience;
  patience.connect = beats ? std::min<Duration>(options_.heartbeat_limit, kLongestConnect)
                           : Duration(kLongestConnect);
  patience.answer = beats ? options_.heartbeat_limit : Duration(-1);
  patience.first_pause = kFirstPause;
  patience.longest_pause = kInterval;
  patience.breaks_for_gone = 0;
  patience.awaits_a_socket = false;  // the next round asks; its time is no other's silence
  return patience;
}

void Rounds::askLater(const Incarnation& id, Duration pause) {
  targets_.at(id).timer = loop_.runAt(Clock::now() + pause, [this, id] { ask(id); });
}

void Rounds::ask(const Incarnation& id) {
  Target& target = targets_.at(id);
  target.timer = 0;
  const ProbeQuestion question{options_.self, id, target.addresses,
                               static_cast<uint8_t>(LivenessKind::kMain)};
  target.probe = std::make_unique<Probe>(
      loop_, question, patience(), [this, id](const ProbeAnswer& answer) { onAnswer(id, answer); });
}

void Rounds::onAnswer(const Incarnation& id, const ProbeAnswer& answer) {
  Target& target = targets_.at(id);
  target.probe.reset();
  const size_t asked = answer.tries % target.addresses.size();
  std::rotate(target.addresses.begin(), target.addresses.begin() + static_cast<ptrdiff_t>(asked),
              target.addresses.end());
  if (answer.liveness != Liveness::kUnknown) see(id, answer);
  if (answer.liveness != Liveness::kGone) askLater(id, interval());
}

void Rounds::see(const Incarnation& id, const ProbeAnswer& answer) {
  Target& target = targets_.at(id);
  if (target.liveness == answer.liveness) return;
  target.liveness = answer.liveness;
  mailbox_->put({id, answer.liveness, describe(target, answer)});
}

std::string Rounds::describe(const Target& target, const ProbeAnswer& answer) const {
  switch (answer.liveness) {
    case Liveness::kGone:
      return "its process ended";
    case Liveness::kUnreachable:
      return "its host cannot be reached";
    case Liveness::kSilent:
      break;
    case Liveness::kAlive:
    case Liveness::kUnknown:
      return {};
  }
  const std::string how = "its process has not answered for " + formatSeconds(answer.waited);
  const std::string state =
      target.host == options_.host ? describeProcessState(target.pid) : std::string();
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

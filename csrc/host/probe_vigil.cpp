#include "host/probe_vigil.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "base/mutex.h"
#include "net/dial.h"
#include "net/local_address.h"
#include "peers/line_kind.h"
#include "peers/process_state.h"
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
class Board {
 public:
  void put(Vigil::Report report) {
    MutexLock lock(mutex_);
    reports_.push_back(std::move(report));
    news_.store(true, std::memory_order_release);
  }
  bool hasNews() const { return news_.load(std::memory_order_acquire); }
  std::vector<Vigil::Report> take() {
    MutexLock lock(mutex_);
    news_.store(false, std::memory_order_release);
    return std::exchange(reports_, {});
  }

 private:
  Mutex mutex_;
  std::vector<Vigil::Report> reports_ GUARDED_BY(mutex_);
  std::atomic<bool> news_{false};  // written under mutex_
};

// Loop thread only, but for construction. Kept by a timer of the loop from start() to stop(), so
// that it always ends there.
class Rounds : public std::enable_shared_from_this<Rounds> {
 public:
  Rounds(EventLoop& loop, VigilOptions options, std::shared_ptr<Board> board)
      : loop_(loop), options_(std::move(options)), board_(std::move(board)) {}

  void start();
  void watch(const std::vector<MemberRecord>& members);
  void stop();

 private:
  struct Target {
    std::string host;
    int64_t pid = -1;
    std::vector<SocketAddress> doors;
    size_t next_door = 0;
    std::unique_ptr<Dial> dial;
    Clock::time_point asked;
    std::optional<Clock::time_point> failing_since;  // neither an answer nor a refusal
    std::optional<Vigil::Sight> sight;
    EventLoop::TimerId timer = 0;
  };

  void drop(Target& target);
  void askLater(const Incarnation& id, Duration pause);
  void ask(const Incarnation& id);
  void onEnd(const Incarnation& id, const Dial::Result& result);
  void onTrouble(const Incarnation& id, const Dial::Result& result);
  void see(const Incarnation& id, Vigil::Sight sight, std::string how);
  std::string describeSilence(const Target& target) const;
  Duration connectPatience() const;
  Duration interval() const;

  EventLoop& loop_;
  const VigilOptions options_;
  const std::shared_ptr<Board> board_;
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
    target.doors =
        withoutLocal(member.line_addresses.empty() ? member.addresses : member.line_addresses);
    if (!target.doors.empty()) kept.emplace(member.incarnation, std::move(target));
  }
  for (auto& [id, target] : targets_) drop(target);
  targets_ = std::move(kept);
  for (auto& [id, target] : targets_) {
    const bool fresh = !target.dial && target.timer == 0 && !target.sight;
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
  const size_t door = target.next_door++ % target.doors.size();
  const Hello hello = lifeQuestion(options_.self, id, static_cast<uint8_t>(LineKind::kMain));
  const bool beats = options_.heartbeat_limit > Duration::zero();
  target.dial = std::make_unique<Dial>(
      loop_, target.doors[door], hello, Welcome{{}, id}, Deadline::after(connectPatience()),
      beats ? options_.heartbeat_limit : Duration(-1),
      [this, id](const Dial::Result& result) { onEnd(id, result); });
}

void Rounds::onEnd(const Incarnation& id, const Dial::Result& result) {
  Target& target = targets_.at(id);
  const std::unique_ptr<Dial> spent = std::move(target.dial);
  switch (lifeSignOf(result)) {
    case LifeSign::kUnclear:
      return onTrouble(id, result);
    case LifeSign::kGone:
      return see(id, Vigil::Sight::kGone, "its process ended");
    case LifeSign::kSilent:
      see(id, Vigil::Sight::kFrozen, describeSilence(target));
      break;
    case LifeSign::kAlive:
      see(id, Vigil::Sight::kAlive, "");
      break;
  }
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
  see(id, Vigil::Sight::kUnreachable, "its host cannot be reached");
  askLater(id, interval());
}

void Rounds::see(const Incarnation& id, Vigil::Sight sight, std::string how) {
  Target& target = targets_.at(id);
  if (target.sight == sight) return;
  target.sight = sight;
  board_->put({id, sight, std::move(how)});
}

std::string Rounds::describeSilence(const Target& target) const {
  std::string how =
      "its process has not answered for " + formatSeconds(Clock::now() - target.asked);
  if (target.host != options_.host) return how;
  const std::string state = describeProcessState(target.pid);
  return state.empty() ? how : how + " (" + state + ")";
}

class ProbeVigil final : public Vigil {
 public:
  ProbeVigil(EventLoop& loop, const VigilOptions& options)
      : loop_(loop), board_(std::make_shared<Board>()) {
    auto rounds = std::make_shared<Rounds>(loop, options, board_);
    rounds_ = rounds;
    loop_.post([rounds = std::move(rounds)] { rounds->start(); });
  }
  ~ProbeVigil() override {
    tell([](Rounds& rounds) { rounds.stop(); });
  }
  ProbeVigil(const ProbeVigil&) = delete;
  ProbeVigil& operator=(const ProbeVigil&) = delete;

  void watch(std::vector<MemberRecord> members) override {
    tell([members = std::move(members)](Rounds& rounds) { rounds.watch(members); });
  }
  bool hasNews() const override { return board_->hasNews(); }
  std::vector<Report> news() override { return board_->take(); }

 private:
  void tell(std::function<void(Rounds&)> call) {
    loop_.post([weak = rounds_, call = std::move(call)] {
      if (const auto rounds = weak.lock()) call(*rounds);
    });
  }

  EventLoop& loop_;
  const std::shared_ptr<Board> board_;
  std::weak_ptr<Rounds> rounds_;  // locked on the loop alone
};

}  // namespace

std::unique_ptr<Vigil> makeProbeVigil(EventLoop& loop, const VigilOptions& options) {
  return std::make_unique<ProbeVigil>(loop, options);
}

}  // namespace torchft_ext

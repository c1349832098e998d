#include "host/host_engine.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <list>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/host_name.h"
#include "base/log.h"
#include "base/member_incarnation.h"
#include "base/threads.h"
#include "comm/callbacks.h"
#include "host/host_communicator.h"
#include "host/socket_member_prober.h"
#include "net/handshake.h"
#include "net/local_address.h"

namespace torchft_ext {
namespace {

constexpr Duration kLeastToConnect = std::chrono::seconds(2);
constexpr Duration kPoll = std::chrono::milliseconds(20);
constexpr Duration kEagerPoll = std::chrono::milliseconds(5);
// Far longer than its threads need to start.
constexpr Duration kOpensWithin = std::chrono::seconds(60);
// Its threads, which end in microseconds as a rule.
constexpr Duration kEndsWithin = std::chrono::seconds(1);
// A member whose connection ended may be trying again under the same prefix: its successor is
// awaited so long.
constexpr Duration kSuccessorWithin = std::chrono::milliseconds(200);

Failure failureOf(FailureKind kind, std::string how) {
  Failure failure;
  failure.kind = kind;
  failure.cause.how = std::move(how);
  return failure;
}

// What the thread in form() and the loop tell each other.
struct FormingState {
  Mutex mutex;
  CondVar changed;
  bool up GUARDED_BY(mutex) = false;
  bool superseded GUARDED_BY(mutex) = false;
  std::optional<Failure> broken GUARDED_BY(mutex);

  void wait(Deadline deadline, const Lifecycle& lifecycle) {
    MutexLock lock(mutex);
    while (!up && !broken && !lifecycle.over() && !deadline.expired())
      changed.waitUntil(mutex, deadline);
  }
  void wake() {
    MutexLock lock(mutex);
    changed.notifyAll();
  }
  bool isUp() {
    MutexLock lock(mutex);
    return up;
  }
};

class HostEngine : public Engine, public std::enable_shared_from_this<HostEngine> {
 public:
  enum class Kind { kOfProcess, kSeparate };  // the registry's, or a test's
  HostEngine(const HostEngineOptions& options, const Incarnation& incarnation, Kind kind)
      : options_(options), incarnation_(incarnation), kind_(kind), loop_("ft-loop") {}
  ~HostEngine() override { stop(Deadline::after(std::chrono::seconds(1))); }

  std::optional<Failure> open();
  bool stop(Deadline deadline);

  const char* name() const override { return "host"; }
  std::variant<std::shared_ptr<Engine>, Failure> forMember(int member) override;
  std::vector<std::pair<std::string, int64_t>> counters() const override;
  std::variant<MemberRecord, Failure> describeSelf() override;
  std::unique_ptr<MemberProber> makeMemberProber(int size) override;
  Duration frozenAfter() const override { return options_.heartbeat_limit; }
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override;
  void cutConnectionTo(const Incarnation& peer) {
    if (monitor_) monitor_->cutConnectionForTest(peer);
  }
  void holdUp(Duration how_long) {
    loop_.post([how_long] { std::this_thread::sleep_for(how_long); });
    if (monitor_) monitor_->holdUpForTest(how_long);
  }

 private:
  using Formed = std::variant<std::shared_ptr<Communicator>, Failure, std::monostate>;

  std::shared_ptr<HostGeneration> startGeneration(const Roster& roster,
                                                  const std::shared_ptr<Lifecycle>& lifecycle,
                                                  Deadline deadline,
                                                  const std::shared_ptr<FormingState>& attempt);
  Formed await(FormingState& attempt, const std::shared_ptr<HostGeneration>& generation,
               const std::shared_ptr<Lifecycle>& lifecycle, Deadline deadline,
               const std::function<bool()>& superseded);
  Failure timedOut(const std::shared_ptr<HostGeneration>& generation, const Roster& roster);

  const HostEngineOptions options_;
  const Incarnation incarnation_;
  const Kind kind_;
  const std::shared_ptr<SharedUse> use_ = std::make_shared<SharedUse>();
  EventLoop loop_;
  std::shared_ptr<Listener> listener_;    // set by open()
  std::shared_ptr<PeerMonitor> monitor_;  // set by open(); null: none could be started
  using Generations = std::list<std::weak_ptr<HostGeneration>>;
  // contents: loop thread only
  const std::shared_ptr<Generations> generations_ = std::make_shared<Generations>();
};

std::optional<Failure> HostEngine::open() {
  std::string error;
  const auto local = options_.local_sockets ? newLocalAddress() : std::nullopt;
  listener_ =
      Listener::open(loop_, options_.bind_address, options_.ports, &error, incarnation_, local);
  if (!listener_) {
    Failure failure =
        failureOf(FailureKind::kRendezvous, error + "; choose another interface or port range");
    failure.needs_new_group = true;  // this one has not been made
    return failure;
  }
  // Answers the member probers of others where there is no monitor that would.
  loop_.post([listener = listener_] {
    listener->expect(kProbeNonce, GenerationSecret{}, [](Arrival&) { return false; });
  });
  MonitorOptions monitor;
  monitor.bind_address = options_.bind_address;
  monitor.ports = options_.ports;
  monitor.heartbeat_limit = options_.heartbeat_limit;
  monitor.self = incarnation_;
  monitor.host = hostName();
  monitor_ = PeerMonitor::start(monitor, &error);
  if (!monitor_) {
    log(LogLevel::kWarning,
        "the peer monitor cannot start (" + error +
            "): deaths are noticed by closing connections, frozen peers at timeouts only");
  }
  return std::nullopt;
}

bool HostEngine::stop(Deadline deadline) {
  bool stopped = true;
  if (monitor_) stopped = monitor_->stop(deadline);
  loop_.runOnLoop(
      [generations = generations_] {
        for (const auto& weak : *generations) {
          if (auto generation = weak.lock()) generation->close();
        }
      },
      deadline);
  return loop_.stop(deadline) && stopped;
}

std::variant<MemberRecord, Failure> HostEngine::describeSelf() {
  MemberRecord record;
  record.incarnation = incarnation_;
  record.host = hostName();
  record.pid = ::getpid();
  record.addresses = listener_->addresses();
  record.shares_memory = options_.shared_memory && options_.local_sockets;
  if (monitor_) record.liveness_addresses = monitor_->livenessAddresses();
  return record;
}

std::unique_ptr<MemberProber> HostEngine::makeMemberProber(int size) {
  MemberProberOptions options;
  options.self = incarnation_;
  options.host = hostName();
  options.heartbeat_limit = options_.heartbeat_limit;
  options.world = size;
  return makeSocketMemberProber(loop_, options);
}

std::vector<std::pair<std::string, int64_t>> HostEngine::counters() const {
  const Listener::Counts counts = listener_->counts();
  std::vector<std::pair<std::string, int64_t>> all{
      {"connections_accepted", static_cast<int64_t>(counts.accepted)},
      {"connections_admitted", static_cast<int64_t>(counts.admitted)},
      {"connections_local", static_cast<int64_t>(counts.admitted_locally)},
      {"connections_refused", static_cast<int64_t>(counts.refused)},
      {"callback_threads", static_cast<int64_t>(callbackThreads().threads)},
      {"most_callback_threads", static_cast<int64_t>(callbackThreads().most_threads)},
      {"monitor", monitor_ ? 1 : 0},
      {"shared_plans", static_cast<int64_t>(options_.plans.digest())},
      {"shared_generations", static_cast<int64_t>(use_->generations.load())},
  };
  for (size_t plan = 0; plan < kSharedPlans; ++plan) {
    all.emplace_back(std::string("shared_") + toString(static_cast<SharedPlan>(plan)),
                     static_cast<int64_t>(use_->by_plan[plan].load(std::memory_order_relaxed)));
  }
  if (!monitor_) return all;
  const MonitorStats stats = monitor_->stats();
  all.emplace_back("monitor_private_tables", stats.private_tables ? 1 : 0);
  all.emplace_back("monitor_realtime", stats.realtime ? 1 : 0);
  all.emplace_back("monitor_connections", stats.connections);
  all.emplace_back("monitor_watches", stats.watches);
  all.emplace_back("monitor_deaths", static_cast<int64_t>(stats.deaths));
  all.emplace_back("monitor_freezes", static_cast<int64_t>(stats.freezes));
  all.emplace_back("monitor_lost_connections", static_cast<int64_t>(stats.lost_connections));
  all.emplace_back("monitor_notices_sent", static_cast<int64_t>(stats.notices_sent));
  all.emplace_back("monitor_notices_heard", static_cast<int64_t>(stats.notices_heard));
  return all;
}

// ---------------------------------------------------------------- forming a generation

std::shared_ptr<HostGeneration> HostEngine::startGeneration(
    const Roster& roster, const std::shared_ptr<Lifecycle>& lifecycle, Deadline deadline,
    const std::shared_ptr<FormingState>& attempt) {
  HostGenerationSetup setup;
  setup.loop = &loop_;
  setup.engine = weak_from_this();
  setup.listener = listener_;
  setup.monitor = monitor_;
  setup.roster = roster;
  setup.lifecycle = lifecycle;
  setup.local_sockets = options_.local_sockets;
  setup.tuning = options_.tuning;
  setup.plans = options_.plans;
  setup.use = use_;
  setup.deadline = deadline;
  setup.connect_by = deadline;
  if (const Duration limit = options_.heartbeat_limit; limit > Duration::zero()) {
    setup.connect_by = deadline.orEarlier(std::max<Duration>(limit, kLeastToConnect));
  }
  auto generation = std::make_shared<HostGeneration>(std::move(setup));

  HostGeneration::FormingCallbacks callbacks;
  callbacks.up = [attempt] {
    MutexLock lock(attempt->mutex);
    attempt->up = true;
    attempt->changed.notifyAll();
  };
  callbacks.broken = [attempt](const Failure& failure, bool superseded) {
    MutexLock lock(attempt->mutex);
    if (!attempt->broken) attempt->broken = failure;
    attempt->superseded = attempt->superseded || superseded;
    attempt->changed.notifyAll();
  };
  loop_.post([generations = generations_, generation, callbacks = std::move(callbacks)]() mutable {
    generations->remove_if(
        [](const std::weak_ptr<HostGeneration>& weak) { return weak.expired(); });
    generations->push_back(generation);
    generation->start(std::move(callbacks));
  });
  return generation;
}

Failure HostEngine::timedOut(const std::shared_ptr<HostGeneration>& generation,
                             const Roster& roster) {
  auto missing = std::make_shared<std::vector<int>>();
  const bool asked =
      loop_.runOnLoop([generation, missing] { *missing = generation->missingRanks(); },
                      Deadline::after(std::chrono::milliseconds(200)));
  Failure failure =
      failureOf(FailureKind::kTimeout, "the generation's connections did not come up in time");
  if (!asked || missing->empty()) return failure;
  const MemberRecord& first = roster.members[static_cast<size_t>(missing->front())];
  failure.cause = {missing->front(), -1, first.host, first.pid,
                   "its connections did not come up in time"};
  return failure;
}

HostEngine::Formed HostEngine::await(FormingState& attempt,
                                     const std::shared_ptr<HostGeneration>& generation,
                                     const std::shared_ptr<Lifecycle>& lifecycle, Deadline deadline,
                                     const std::function<bool()>& superseded) {
  std::optional<Deadline> successor_deadline;
  while (true) {
    attempt.wait(deadline.orEarlier(successor_deadline ? kEagerPoll : kPoll), *lifecycle);
    const FailurePtr failure = lifecycle->failure();  // before `up`: what fails later had formed
    bool up = false;
    bool awaits_successor = false;
    std::optional<Failure> broken;
    {
      MutexLock lock(attempt.mutex);
      up = attempt.up;
      awaits_successor = attempt.superseded;
      broken = attempt.broken;
    }
    if (up) {
      return std::shared_ptr<Communicator>(
          std::make_shared<HostCommunicator>(loop_, generation, lifecycle, shared_from_this()));
    }
    if (failure) return *failure;
    if (superseded() && !attempt.isUp()) return std::monostate{};
    // A store that does not answer keeps superseded() to the deadline, and the generation forms
    // meanwhile.
    if (deadline.expired() && !attempt.isUp()) return timedOut(generation, generation->roster());
    if (!broken) continue;
    if (!successor_deadline) {
      successor_deadline = awaits_successor ? deadline : deadline.orEarlier(kSuccessorWithin);
    }
    if (successor_deadline->expired()) return *broken;
    // wait() returns at once for a broken attempt: pace the polling here.
    MutexLock lock(attempt.mutex);
    if (!lifecycle->over()) attempt.changed.waitUntil(attempt.mutex, Deadline::after(kEagerPoll));
  }
}

HostEngine::Formed HostEngine::form(const Roster& roster, std::shared_ptr<Lifecycle> lifecycle,
                                    Deadline deadline, const std::function<bool()>& superseded) {
  auto attempt = std::make_shared<FormingState>();
  const Lifecycle::Subscription subscription =
      lifecycle->subscribe([attempt](const FailurePtr&) { attempt->wake(); });
  auto generation = startGeneration(roster, lifecycle, deadline, attempt);
  // If the hook in superseded() throws (a signal), the attempt must not stay behind.
  struct Dissolve {
    EventLoop& loop;
    std::shared_ptr<HostGeneration> generation;
    ~Dissolve() {
      if (generation) loop.post([generation = std::move(generation)] { generation->dissolve(); });
    }
  } dissolve{loop_, generation};

  Formed formed = await(*attempt, generation, lifecycle, deadline, superseded);
  lifecycle->unsubscribe(subscription);
  if (std::holds_alternative<std::shared_ptr<Communicator>>(formed)) {
    dissolve.generation.reset();
  } else if (auto* failure = std::get_if<Failure>(&formed)) {
    // Told to the members that are connected already, by the generation's own subscription.
    lifecycle->fail(*failure);
  }
  return formed;
}

using Made = std::variant<std::shared_ptr<Engine>, Failure>;

// Engines of members beyond the first that come to their end: on a thread for each, since nobody
// may wait for that who lets go of one (the interpreter's lock may be held, or its own loop be
// running). Threads: any.
class EndingEngines {
 public:
  void add(std::shared_ptr<HostEngine> engine) noexcept {
    try {
      auto end = [this, engine] {  // this: one for the process, and never destroyed
        if (!engine->stop(Deadline::after(kEndsWithin))) keep(engine);
      };
      OwnedThread thread("ft-ending", std::move(end));
      engine.reset();
      std::vector<OwnedThread> ended;  // go after the lock
      MutexLock lock(mutex_);
      const auto running = std::partition(threads_.begin(), threads_.end(),
                                          [](const OwnedThread& each) { return !each.running(); });
      std::move(threads_.begin(), running, std::back_inserter(ended));
      threads_.erase(threads_.begin(), running);
      threads_.push_back(std::move(thread));
    } catch (const std::exception& error) {
      log(LogLevel::kWarning, std::string("an engine is left without an end: ") + error.what());
      if (engine) keep(std::move(engine));
    }
  }

  bool join(Deadline deadline) {
    std::vector<OwnedThread> threads;
    std::vector<std::shared_ptr<HostEngine>> kept;
    {
      MutexLock lock(mutex_);
      threads.swap(threads_);
      kept = kept_;
    }
    bool ended = true;
    for (const auto& engine : kept) ended = engine->stop(deadline) && ended;
    for (OwnedThread& thread : threads) {
      if (thread.join(deadline)) continue;
      thread.abandon("the process exits");
      ended = false;
    }
    return ended;
  }

 private:
  // What did not end is not destroyed either: its threads may be in it.
  void keep(std::shared_ptr<HostEngine> engine) {
    MutexLock lock(mutex_);
    kept_.push_back(std::move(engine));
  }

  Mutex mutex_;
  std::vector<OwnedThread> threads_ GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<HostEngine>> kept_ GUARDED_BY(mutex_);
};

PerProcess<EndingEngines> ending_engines;

// What those who use a member beyond the first hold together: with it the member's engine ends.
struct MemberHold {
  MemberHold(std::shared_ptr<HostEngine> of_member, std::shared_ptr<const Incarnation> its)
      : engine(std::move(of_member)), incarnation(std::move(its)) {}
  ~MemberHold() {
    if (engine) ending_engines.get().add(std::move(engine));
  }
  MemberHold(const MemberHold&) = delete;
  MemberHold& operator=(const MemberHold&) = delete;

  std::shared_ptr<HostEngine> engine;
  const std::shared_ptr<const Incarnation> incarnation;
};

// The process's engines by their options and members. One is opened without the lock, for as long
// as its threads need to start (bounded); who wants the same one waits for that.
class HostEngines {
 public:
  using Engines = std::vector<std::shared_ptr<HostEngine>>;

  Made find(const HostEngineOptions& options, int member = 0) {
    const Key key{options.key(), member};
    std::shared_ptr<const Incarnation> incarnation;
    {
      MutexLock lock(mutex_);
      const Deadline late = Deadline::after(kOpensWithin);
      while (opening_.count(key) != 0 && !late.expired()) changed_.waitUntil(mutex_, late);
      if (opening_.count(key) != 0)
        return failureOf(FailureKind::kTimeout,
                         "another thread has not opened the same engine within 60 s");
      if (auto found = findOpen(key)) return found;
      incarnation = incarnationOf(member);  // throws in a second copy of this library
      opening_.insert(key);
    }
    const Opening opening{*this, key};
    auto engine = std::make_shared<HostEngine>(options, *incarnation, HostEngine::Kind::kOfProcess);
    if (auto failure = engine->open()) return *failure;
    MutexLock lock(mutex_);
    if (member == 0) {
      engines_[key.first] = engine;
      return std::shared_ptr<Engine>(std::move(engine));
    }
    auto hold = std::make_shared<MemberHold>(std::move(engine), std::move(incarnation));
    holds_[key] = hold;
    return engineOf(hold);
  }

  // What has been opened, and by the deadline also what is being opened.
  Engines takeAll(Deadline deadline) {
    std::vector<std::shared_ptr<MemberHold>> holds;  // go after the lock
    MutexLock lock(mutex_);
    while (!opening_.empty() && !deadline.expired()) changed_.waitUntil(mutex_, deadline);
    Engines all;
    for (auto& [key, engine] : std::exchange(engines_, {})) all.push_back(std::move(engine));
    for (const auto& [key, weak] : std::exchange(holds_, {})) {
      if (auto hold = weak.lock()) holds.push_back(std::move(hold));
    }
    for (const auto& hold : holds) all.push_back(hold->engine);
    return all;
  }

 private:
  using Key = std::pair<std::string, int>;  // options, member

  static std::shared_ptr<Engine> engineOf(const std::shared_ptr<MemberHold>& hold) {
    return {hold, hold->engine.get()};
  }

  std::shared_ptr<Engine> findOpen(const Key& key) REQUIRES(mutex_) {
    if (key.second == 0) {
      const auto found = engines_.find(key.first);
      return found == engines_.end() ? nullptr : found->second;
    }
    const auto found = holds_.find(key);
    const auto hold = found == holds_.end() ? nullptr : found->second.lock();
    return hold ? engineOf(hold) : nullptr;
  }

  std::shared_ptr<const Incarnation> incarnationOf(int member) REQUIRES(mutex_) {
    if (member == 0) return std::make_shared<const Incarnation>(selfIncarnation());
    std::weak_ptr<const Incarnation>& known = incarnations_[member];
    auto incarnation = known.lock();
    if (!incarnation)
      known = incarnation = std::make_shared<const Incarnation>(newMemberIncarnation());
    return incarnation;
  }

  struct Opening {
    HostEngines& all;
    const Key& key;
    ~Opening() {
      MutexLock lock(all.mutex_);
      all.opening_.erase(key);
      all.changed_.notifyAll();
    }
  };

  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::shared_ptr<HostEngine>> engines_ GUARDED_BY(mutex_);  // of member 0
  std::map<Key, std::weak_ptr<MemberHold>> holds_ GUARDED_BY(mutex_);              // of the others
  std::map<int, std::weak_ptr<const Incarnation>> incarnations_ GUARDED_BY(mutex_);
  std::set<Key> opening_ GUARDED_BY(mutex_);
};

// The parent's threads are not in a forked child, so its engines must be neither used nor ended.
PerProcess<HostEngines> registry;

Made HostEngine::forMember(int member) {
  if (kind_ == Kind::kSeparate) return std::shared_ptr<Engine>();
  return registry.get().find(options_, member);
}

}  // namespace

std::string HostEngineOptions::key() const {
  return bind_address.ip() + "|" + std::to_string(ports.first) + "-" + std::to_string(ports.last) +
         "|" + std::to_string(heartbeat_limit.count()) + "|" + std::to_string(tuning.chunk_bytes) +
         "|" + std::to_string(tuning.small_bytes) + "|" + std::to_string(tuning.direct_world) +
         "|" + (local_sockets ? "local" : "tcp") + "|" + (shared_memory ? "shm" : "") + "|" +
         std::to_string(plans.digest());
}

std::variant<std::shared_ptr<Engine>, Failure> makeHostEngineForTest(
    const HostEngineOptions& options) {
  auto engine =
      std::make_shared<HostEngine>(options, Incarnation::random(), HostEngine::Kind::kSeparate);
  if (auto failure = engine->open()) return *failure;
  return std::shared_ptr<Engine>(std::move(engine));
}

void holdUpForTest(Engine& engine, Duration how_long) {
  dynamic_cast<HostEngine&>(engine).holdUp(how_long);
}

void cutConnectionForTest(Engine& engine, const Incarnation& peer) {
  dynamic_cast<HostEngine&>(engine).cutConnectionTo(peer);
}

std::variant<std::shared_ptr<Engine>, Failure> hostEngine(const HostEngineOptions& options) {
  return registry.get().find(options);
}

bool stopHostEngines(Deadline deadline) {
  bool stopped = true;
  for (const auto& engine : registry.get().takeAll(deadline))
    stopped = engine->stop(deadline) && stopped;
  return ending_engines.get().join(deadline) && stopped;
}

}  // namespace torchft_ext

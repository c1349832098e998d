#include "monitor_world.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>

namespace torchft_ext {
namespace {

constexpr milliseconds kRedial{20};
constexpr milliseconds kGrace{500};
constexpr milliseconds kProbeLook{5};
constexpr int kBeatsPerLimit = 5;
constexpr std::chrono::seconds kLongestConnect{2};  // the detector's

constexpr size_t indexOf(LivenessKind kind) {
  return kind == LivenessKind::kMain ? 0 : 1;
}

}  // namespace

// One direction of a connection. Whoever holds the pointer can tell whether it is still the same
// connection.
struct MonitorWorld::Channel {
  bool lost = false;  // nothing on its way arrives any more
  Time last;          // arrivals keep their order
};

// A process: its failure propagation, and what LivenessTable does for it.
class MonitorWorld::Process : private PropagationOrders {
 public:
  enum class State { kRuns, kFrozen, kEnded };

  Process(MonitorWorld& world, int number, const Incarnation& incarnation)
      : world_(world),
        number_(number),
        incarnation_(incarnation),
        propagation_(*this, world.options_.heartbeat_limit,
                     {incarnation, "host" + std::to_string(number), number}) {}

  State state() const { return state_; }
  const Incarnation& incarnation() const { return incarnation_; }
  FailurePropagation& propagation() { return propagation_; }
  const FailurePropagation& propagation() const { return propagation_; }
  bool expects(const Nonce& nonce) const { return expected_.count(nonce) > 0; }
  int mainConnections() const { return static_cast<int>(ends_[0].size()); }
  bool takesPart(int generation) const {
    return watches_.count(static_cast<WatchId>(generation)) > 0;
  }

  void beginGeneration(int generation);
  void removeWatch(int generation);
  void exit();
  void end();
  void freeze() { state_ = State::kFrozen; }
  void thaw();
  void cut(int peer, LivenessKind kind);
  // Whatever reaches the process; a frozen one comes to it when it thaws.
  void receive(Event event);

 private:
  struct Ends {  // this process's end of a connection
    std::shared_ptr<Channel> in;
    std::shared_ptr<Channel> out;
  };
  using Wishes = std::map<int, std::set<WatchId>>;  // by peer

  void fail(WatchId watch, Failure failure) override;
  bool send(const Incarnation& to, const Notice& notice) override;
  void retire(WatchId watch) override;
  void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) override;
  void accuse(const Incarnation& peer, const std::string& why) override;
  void warn(const std::string&) override {}
  std::string processState(const std::string&, int64_t) override { return ""; }

  Ends* endsOf(int peer, LivenessKind kind) {
    const auto found = ends_[indexOf(kind)].find(peer);
    return found == ends_[indexOf(kind)].end() ? nullptr : &found->second;
  }
  void act(const std::function<void(FailurePropagation&)>& call);
  void arm();
  void transmit(const std::shared_ptr<Channel>& channel, int to, Event event) {
    transmitAfter(world_.delay(), channel, to, std::move(event));
  }
  void transmitAfter(Duration delay, const std::shared_ptr<Channel>& channel, int to, Event event);
  void dial(int peer, LivenessKind kind);
  void connect(int peer, LivenessKind kind);
  void stand(int peer, LivenessKind kind, Ends ends);
  void connectionEnded(int peer, LivenessKind kind, const std::shared_ptr<Channel>& in,
                       LivenessEnd end);
  void closeWith(int peer, LivenessKind kind, LivenessEnd last_word);
  void look(int peer, LivenessKind kind, Time began, ProbeOrder order);
  void finishProbe(int peer, LivenessKind kind, uint64_t number, Liveness answer);
  void beat();
  Event beatAt(Process& other);
  void confirmAll();

  MonitorWorld& world_;
  const int number_;
  const Incarnation incarnation_;
  FailurePropagation propagation_;
  State state_ = State::kRuns;
  std::deque<Event> deferred_;
  std::set<WatchId> watches_;
  std::set<Nonce> expected_;
  std::array<Wishes, 2> wishes_;
  std::array<std::map<int, Ends>, 2> ends_;
  std::array<std::map<int, Ends>, 2> unconfirmed_;  // stand at the other end already
  std::set<std::pair<int, LivenessKind>> dialling_;
  std::map<std::pair<int, LivenessKind>, uint64_t> probes_;
  std::map<std::pair<int, LivenessKind>, uint64_t> grace_;
  std::set<std::shared_ptr<Channel>> closing_;  // said goodbye to, read from still
  uint64_t next_number_ = 1;
  uint64_t alarm_ = 0;
  bool beating_ = false;
};

// ---------------------------------------------------------------- a process

void MonitorWorld::Process::act(const std::function<void(FailurePropagation&)>& call) {
  call(propagation_);
  arm();
}

void MonitorWorld::Process::arm() {
  const uint64_t number = ++alarm_;
  const std::optional<Time> due = propagation_.nextDue(world_.now_);
  if (!due) return;
  world_.later(std::max(Duration::zero(), Duration(*due - world_.now_)), [this, number] {
    receive([this, number] {
      if (number == alarm_)
        act([this](FailurePropagation& propagation) { propagation.tick(world_.now_); });
    });
  });
}

void MonitorWorld::Process::receive(Event event) {
  if (state_ == State::kEnded) return;
  if (state_ == State::kFrozen) {
    deferred_.push_back(std::move(event));
  } else {
    event();
  }
}

void MonitorWorld::Process::thaw() {
  state_ = State::kRuns;
  while (!deferred_.empty() && state_ == State::kRuns) {
    const Event event = std::move(deferred_.front());
    deferred_.pop_front();
    event();
  }
}

void MonitorWorld::Process::beginGeneration(int number) {
  const Generation& generation = world_.generations_[static_cast<size_t>(number)];
  std::vector<WatchedPeer> peers;
  int self_rank = -1;
  for (size_t rank = 0; rank < generation.members.size(); ++rank) {
    const int member = generation.members[rank];
    if (member == number_) {
      self_rank = static_cast<int>(rank);
    } else {
      peers.push_back(
          {static_cast<int>(rank), world_.at(member).incarnation(), "there", member, true});
    }
  }
  const auto id = static_cast<WatchId>(number);
  watches_.insert(id);
  expected_.insert(generation.nonce);
  act([&](FailurePropagation& propagation) {
    propagation.addWatch(world_.now_, id, generation.nonce, self_rank, peers);
  });
  if (!std::exchange(beating_, true)) beat();
}

void MonitorWorld::Process::removeWatch(int generation) {
  const auto id = static_cast<WatchId>(generation);
  watches_.erase(id);
  act([&](FailurePropagation& propagation) { propagation.removeWatch(world_.now_, id); });
}

void MonitorWorld::Process::exit() {
  const std::set<WatchId> watches = watches_;
  for (const WatchId id : watches) removeWatch(static_cast<int>(id));
  confirmAll();
  for (const LivenessKind kind : {LivenessKind::kMain, LivenessKind::kBackup}) {
    while (!ends_[indexOf(kind)].empty()) {
      closeWith(ends_[indexOf(kind)].begin()->first, kind, LivenessEnd::kLeft);
    }
  }
  state_ = State::kEnded;
}

// For the other ends, those that are under way are connections as any other.
void MonitorWorld::Process::confirmAll() {
  for (size_t kind = 0; kind < ends_.size(); ++kind) {
    ends_[kind].merge(unconfirmed_[kind]);
    unconfirmed_[kind].clear();
  }
}

// The kernel ends its connections; bytes that had not left may be lost with it.
void MonitorWorld::Process::end() {
  state_ = State::kEnded;
  confirmAll();
  for (const LivenessKind kind : {LivenessKind::kMain, LivenessKind::kBackup}) {
    const auto ends = std::exchange(ends_[indexOf(kind)], {});
    for (const auto& [peer, end] : ends) {
      if (world_.random(2) == 0) end.out->lost = true;
      Process& other = world_.at(peer);
      const std::shared_ptr<Channel> channel = end.out;
      world_.later(
          world_.delay() +
              (channel->lost ? Duration::zero()
                             : std::max(Duration::zero(), Duration(channel->last - world_.now_))),
          [&other, channel, self = number_, kind] {
            other.receive([&other, channel, self, kind] {
              other.connectionEnded(self, kind, channel, LivenessEnd::kBroken);
            });
          });
    }
  }
}

void MonitorWorld::Process::cut(int peer, LivenessKind kind) {
  auto& unconfirmed = unconfirmed_[indexOf(kind)];
  if (const auto found = unconfirmed.find(peer); found != unconfirmed.end()) {
    found->second.out->lost = true;
    unconfirmed.erase(found);
    return dial(peer, kind);
  }
  const Ends* ends = endsOf(peer, kind);
  if (ends == nullptr) return;
  ends->out->lost = true;
  const std::shared_ptr<Channel> in = ends->in;
  world_.later(world_.delay(), [this, peer, kind, in] {
    receive([this, peer, kind, in] { connectionEnded(peer, kind, in, LivenessEnd::kBroken); });
  });
}

void MonitorWorld::Process::beat() {
  const Duration limit = world_.options_.heartbeat_limit;
  if (limit == Duration::zero()) return;
  for (const auto& [peer, ends] : ends_[0]) transmit(ends.out, peer, beatAt(world_.at(peer)));
  world_.later(limit / kBeatsPerLimit, [this] { receive([this] { beat(); }); });
}

MonitorWorld::Event MonitorWorld::Process::beatAt(Process& other) {
  return [&other, from = incarnation_] { other.propagation_.heard(other.world_.now_, from); };
}

void MonitorWorld::Process::transmitAfter(Duration delay, const std::shared_ptr<Channel>& channel,
                                          int to, Event event) {
  Process& other = world_.at(to);
  channel->last = std::max(channel->last, world_.now_ + delay);
  world_.later(channel->last - world_.now_,
               [world = &world_, self = number_, to, &other, channel, event = std::move(event)] {
                 if (channel->lost || world->isMuted(self, to)) return;
                 other.receive(event);
               });
}

// ---------------------------------------------------------------- its connections

void MonitorWorld::Process::wantConnection(WatchId watch, const Incarnation& id,
                                           LivenessKind kind) {
  const int peer = world_.processOf(id);
  wishes_[indexOf(kind)][peer].insert(watch);
  grace_.erase({peer, kind});
  if (endsOf(peer, kind) != nullptr) {
    world_.later(Duration::zero(), [this, peer, kind, id] {
      receive([this, peer, kind, id] {
        if (endsOf(peer, kind) == nullptr) return;
        act([&](FailurePropagation& propagation) {
          propagation.connectionUp(world_.now_, id, kind);
        });
      });
    });
  } else {
    dial(peer, kind);
  }
}

void MonitorWorld::Process::unwantConnection(WatchId watch, const Incarnation& id,
                                             LivenessKind kind) {
  const int peer = world_.processOf(id);
  Wishes& wishes = wishes_[indexOf(kind)];
  const auto found = wishes.find(peer);
  ASSERT_TRUE(found != wishes.end() && found->second.erase(watch) == 1);
  if (!found->second.empty()) return;
  wishes.erase(found);
  probes_.erase({peer, kind});
  if (!(incarnation_ > id)) return;
  const uint64_t number = next_number_++;
  grace_[{peer, kind}] = number;
  world_.later(kGrace, [this, peer, kind, number] {
    receive([this, peer, kind, number] {
      const auto grace = grace_.find({peer, kind});
      if (grace == grace_.end() || grace->second != number) return;
      const Ends* ends = endsOf(peer, kind);
      if (ends == nullptr) return;
      closing_.insert(ends->in);
      closeWith(peer, kind, LivenessEnd::kIdle);
    });
  });
}

void MonitorWorld::Process::dial(int peer, LivenessKind kind) {
  const bool connects = incarnation_ > world_.at(peer).incarnation();
  if (!connects || !dialling_.insert({peer, kind}).second) return;
  world_.later(world_.delay(), [this, peer, kind] {
    receive([this, peer, kind] {
      dialling_.erase({peer, kind});
      connect(peer, kind);
    });
  });
}

void MonitorWorld::Process::connect(int peer, LivenessKind kind) {
  const auto wishes = wishes_[indexOf(kind)].find(peer);
  if (wishes == wishes_[indexOf(kind)].end() || endsOf(peer, kind) != nullptr) return;
  if (unconfirmed_[indexOf(kind)].count(peer) > 0) return;
  Process& other = world_.at(peer);
  const bool welcome = std::any_of(wishes->second.begin(), wishes->second.end(), [&](WatchId id) {
    return other.expects(world_.generations_[id].nonce);
  });
  const bool blocked = world_.isBlocked(number_, peer);
  if (blocked || other.state_ != State::kRuns || !welcome) {
    world_.later(kRedial,
                 [this, peer, kind] { receive([this, peer, kind] { dial(peer, kind); }); });
    if (blocked || other.state_ != State::kEnded) return;
    return act([&](FailurePropagation& propagation) {
      propagation.probed(world_.now_, other.incarnation(), kind, Liveness::kGone, 0);
    });
  }
  const auto there = std::make_shared<Channel>();
  const auto back = std::make_shared<Channel>();
  unconfirmed_[indexOf(kind)][peer] = {back, there};
  // Its confirmation first: whatever it says when the connection stands there comes behind that.
  other.transmit(back, number_, [this, peer, kind] {
    auto connection = unconfirmed_[indexOf(kind)].extract(peer);
    if (!connection.empty()) stand(peer, kind, std::move(connection.mapped()));
  });
  other.stand(number_, kind, {there, back});
}

void MonitorWorld::Process::stand(int peer, LivenessKind kind, Ends ends) {
  // With a first beat, of the shortest delay: so that the schedules of all seeds stay as they are.
  if (kind == LivenessKind::kMain && world_.options_.heartbeat_limit > Duration::zero()) {
    transmitAfter(world_.options_.shortest_delay, ends.out, peer, beatAt(world_.at(peer)));
  }
  ends_[indexOf(kind)][peer] = std::move(ends);
  act([&](FailurePropagation& propagation) {
    propagation.connectionUp(world_.now_, world_.at(peer).incarnation(), kind);
  });
}

void MonitorWorld::Process::connectionEnded(int peer, LivenessKind kind,
                                            const std::shared_ptr<Channel>& in, LivenessEnd end) {
  const Ends* ends = endsOf(peer, kind);
  if (ends == nullptr || ends->in != in) return;  // an earlier connection
  ends_[indexOf(kind)].erase(peer);
  act([&](FailurePropagation& propagation) {
    propagation.connectionEnded(world_.now_, world_.at(peer).incarnation(), kind, end);
  });
  dial(peer, kind);
}

void MonitorWorld::Process::closeWith(int peer, LivenessKind kind, LivenessEnd last_word) {
  const Ends ends = *endsOf(peer, kind);
  ends_[indexOf(kind)].erase(peer);
  Process& other = world_.at(peer);
  transmit(ends.out, peer, [&other, channel = ends.out, self = number_, kind, last_word] {
    other.connectionEnded(self, kind, channel, last_word);
  });
}

bool MonitorWorld::Process::send(const Incarnation& to, const Notice& notice) {
  const int peer = world_.processOf(to);
  const Ends* ends = endsOf(peer, LivenessKind::kMain);
  if (ends == nullptr) return false;
  const std::optional<Notice> read = decodeNotice(encodeNotice(notice));
  EXPECT_TRUE(read.has_value());
  if (!read) return false;
  Process& other = world_.at(peer);
  const int known =
      world_.hopsTo(world_.generationOf(notice.generation), number_).value_or(world_.hops_heard_);
  transmit(ends->out, peer,
           [&other, channel = ends->out, from = incarnation_, self = number_, hops = known + 1,
            notice = *read] {
             const Ends* there = other.endsOf(self, LivenessKind::kMain);
             const bool stands = there != nullptr && there->in == channel;
             if (!stands && other.closing_.count(channel) == 0) return;
             other.world_.hops_heard_ = hops;
             other.act([&](FailurePropagation& propagation) {
               propagation.noticed(other.world_.now_, from, notice);
             });
             other.world_.hops_heard_ = 0;
           });
  return true;
}

void MonitorWorld::Process::accuse(const Incarnation& id, const std::string&) {
  const int peer = world_.processOf(id);
  for (const LivenessKind kind : {LivenessKind::kMain, LivenessKind::kBackup}) {
    if (endsOf(peer, kind) != nullptr) closeWith(peer, kind, LivenessEnd::kAccused);
  }
}

void MonitorWorld::Process::fail(WatchId watch, Failure failure) {
  world_.judge(static_cast<int>(watch), number_, failure);
}

void MonitorWorld::Process::retire(WatchId watch) {
  EXPECT_EQ(watches_.count(watch), 0U);
  expected_.erase(world_.generations_[watch].nonce);
}

// ---------------------------------------------------------------- its probes

void MonitorWorld::Process::probe(const Incarnation& id, LivenessKind kind,
                                  const ProbeOrder& order) {
  const int peer = world_.processOf(id);
  probes_[{peer, kind}] = order.number;
  const Time began = world_.now_;
  world_.later(world_.delay(),
               [this, peer, kind, began, order] { look(peer, kind, began, order); });
}

// Runs in the network: this process may be frozen meanwhile.
void MonitorWorld::Process::look(int peer, LivenessKind kind, Time began, ProbeOrder order) {
  const bool blocked = world_.isBlocked(number_, peer);
  const State there = world_.at(peer).state_;
  const Duration waited = world_.now_ - began;
  const Duration bound = blocked ? order.connect : order.answer;
  const bool no_answer = blocked || there == State::kFrozen;
  if (no_answer && (bound < Duration::zero() || waited < bound)) {
    world_.later(kProbeLook, [this, peer, kind, began, order] { look(peer, kind, began, order); });
    return;
  }
  Liveness answer = blocked ? Liveness::kUnreachable : Liveness::kSilent;
  if (!no_answer) answer = there == State::kEnded ? Liveness::kGone : Liveness::kAlive;
  world_.later(world_.delay(), [this, peer, kind, number = order.number, answer] {
    receive([this, peer, kind, number, answer] { finishProbe(peer, kind, number, answer); });
  });
}

void MonitorWorld::Process::finishProbe(int peer, LivenessKind kind, uint64_t number,
                                        Liveness answer) {
  const auto found = probes_.find({peer, kind});
  if (found == probes_.end() || found->second != number) return;
  probes_.erase(found);
  act([&](FailurePropagation& propagation) {
    propagation.probed(world_.now_, world_.at(peer).incarnation(), kind, answer, number);
  });
}

// ---------------------------------------------------------------- the world

MonitorWorld::MonitorWorld(const WorldOptions& options) : options_(options), random_(options.seed) {
  for (int number = 0; number < options.processes; ++number) {
    Incarnation id;
    for (uint8_t& byte : id.bytes) byte = static_cast<uint8_t>(random(256));
    numbers_[id] = number;
    processes_.push_back(std::make_unique<Process>(*this, number, id));
  }
}

MonitorWorld::~MonitorWorld() = default;

Duration MonitorWorld::delay() {
  const bool lost = options_.lost_per_mille > 0 && random(1000) < options_.lost_per_mille;
  const Duration shortest =
      options_.shortest_delay + (lost ? options_.resent_after : Duration::zero());
  const Duration range = options_.longest_delay - options_.shortest_delay;
  if (range == Duration::zero()) return shortest;
  // Mostly short, now and then long: so that news overtake each other on different ways.
  const double part = static_cast<double>(random(1000)) / 1000;
  return shortest + std::chrono::duration_cast<Duration>(range * part * part * part);
}

void MonitorWorld::pass(Duration time) {
  const Time until = now_ + time;
  while (!events_.empty() && events_.begin()->first <= until) {
    now_ = std::max(now_, events_.begin()->first);
    const Event event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    event();
  }
  now_ = until;
}

int MonitorWorld::beginGeneration(const std::vector<int>& members, Duration spread) {
  const int number = static_cast<int>(generations_.size());
  Generation generation;
  for (uint8_t& byte : generation.nonce.bytes) byte = static_cast<uint8_t>(random(256));
  generation.members = members;
  for (const int member : members) generation.broken = generation.broken || !runs(member);
  generations_.push_back(std::move(generation));
  for (const int member : members) {
    const double part = static_cast<double>(random(1000)) / 1000;
    later(std::chrono::duration_cast<Duration>(spread * part), [this, number, member] {
      at(member).receive([this, number, member] { at(member).beginGeneration(number); });
    });
  }
  return number;
}

void MonitorWorld::abort(int number, int member) {
  Process& process = at(member);
  if (!runs(member) || !process.takesPart(number) || toldOf(number, member) != nullptr) return;
  Generation& generation = generations_[static_cast<size_t>(number)];
  generation.broken = true;
  generation.aborters.insert(member);
  Failure failure;
  failure.kind = FailureKind::kAborted;
  const auto place = std::find(generation.members.begin(), generation.members.end(), member);
  failure.cause.rank = static_cast<int>(place - generation.members.begin());
  failure.cause.how = "abort() was called";
  told_[{number, member}] = {failure, 0};
  process.propagation().announce(now_, static_cast<WatchId>(number), failure);
}

void MonitorWorld::leaveGeneration(int generation, int member) {
  if (runs(member) && at(member).takesPart(generation)) at(member).removeWatch(generation);
}

void MonitorWorld::exit(int process) {
  if (!runs(process)) return;
  ever_exited_.insert(process);
  at(process).exit();
}

void MonitorWorld::breakGenerationsWith(int process) {
  for (size_t number = 0; number < generations_.size(); ++number) {
    Generation& generation = generations_[number];
    if (at(process).takesPart(static_cast<int>(number))) generation.broken = true;
  }
}

void MonitorWorld::kill(int process) {
  if (at(process).state() == Process::State::kEnded) return;
  breakGenerationsWith(process);
  ever_killed_.insert(process);
  at(process).end();
}

void MonitorWorld::freeze(int process) {
  if (!runs(process)) return;
  frozen_[process].push_back({now_});
  at(process).freeze();
}

void MonitorWorld::thaw(int process) {
  if (!frozen(process)) return;
  frozen_[process].back().to = now_;
  at(process).thaw();
}

void MonitorWorld::cutConnection(int a, int b) {
  ever_cut_.insert(pairOf(a, b));
  for (const LivenessKind kind : {LivenessKind::kMain, LivenessKind::kBackup}) {
    at(a).cut(b, kind);
    at(b).cut(a, kind);
  }
}

void MonitorWorld::blockPair(int a, int b) {
  if (!isBlocked(a, b)) blocked_[pairOf(a, b)].push_back({now_});
  cutConnection(a, b);
}

void MonitorWorld::unblockPair(int a, int b) {
  if (isBlocked(a, b)) blocked_[pairOf(a, b)].back().to = now_;
}

void MonitorWorld::mutePair(int a, int b) {
  blocked_[pairOf(a, b)].push_back({now_});
  ever_cut_.insert(pairOf(a, b));
  muted_.insert(pairOf(a, b));
}

bool MonitorWorld::isBlocked(int a, int b) const {
  const auto found = blocked_.find(pairOf(a, b));
  return found != blocked_.end() && found->second.back().to == Time::max();
}

bool MonitorWorld::runs(int process) const {
  return at(process).state() == Process::State::kRuns;
}

bool MonitorWorld::frozen(int process) const {
  return at(process).state() == Process::State::kFrozen;
}

int MonitorWorld::connections(int process) const {
  return at(process).mainConnections();
}

uint64_t MonitorWorld::noticesSent() const {
  uint64_t sent = 0;
  for (const auto& process : processes_) sent += process->propagation().counts().notices_sent;
  return sent;
}

const std::vector<int>& MonitorWorld::membersOf(int generation) const {
  return generations_[static_cast<size_t>(generation)].members;
}

const Failure* MonitorWorld::toldOf(int generation, int member) const {
  const auto found = told_.find({generation, member});
  return found == told_.end() ? nullptr : &found->second.failure;
}

std::optional<int> MonitorWorld::hopsTo(int generation, int member) const {
  const auto found = told_.find({generation, member});
  return found == told_.end() ? std::nullopt : std::optional<int>(found->second.hops);
}

int MonitorWorld::generationOf(const Nonce& nonce) const {
  const auto found =
      std::find_if(generations_.begin(), generations_.end(),
                   [&](const Generation& generation) { return generation.nonce == nonce; });
  return static_cast<int>(found - generations_.begin());
}

std::vector<int> MonitorWorld::survivorsOf(int generation) const {
  std::vector<int> survivors;
  for (const int member : membersOf(generation)) {
    if (runs(member) && at(member).takesPart(generation)) survivors.push_back(member);
  }
  return survivors;
}

bool MonitorWorld::isBroken(int generation) const {
  const std::vector<int> survivors = survivorsOf(generation);
  return generations_[static_cast<size_t>(generation)].broken ||
         std::any_of(survivors.begin(), survivors.end(),
                     [&](int member) { return toldOf(generation, member) != nullptr; });
}

std::vector<MonitorWorld::Pair> MonitorWorld::blocked() const {
  std::vector<Pair> blocked;
  for (int generation = 0; generation < static_cast<int>(generations_.size()); ++generation) {
    if (!isBroken(generation)) continue;
    for (const int member : survivorsOf(generation)) {
      if (toldOf(generation, member) == nullptr) blocked.emplace_back(generation, member);
    }
  }
  return blocked;
}

size_t MonitorWorld::generationsKept(int process) const {
  return at(process).propagation().generations();
}

// ---------------------------------------------------------------- the truth

void MonitorWorld::addToDigest(int number, int member, const Failure& failure) {
  const std::string told = std::to_string(number) + ' ' + std::to_string(member) + ' ' +
                           std::to_string(now_.time_since_epoch().count()) + ' ' +
                           failure.describe();
  for (const char letter : told)  // FNV-1a's steps
    digest_ = (digest_ ^ static_cast<uint8_t>(letter)) * 0x100000001b3U;
}

void MonitorWorld::judge(int number, int member, const Failure& failure) {
  addToDigest(number, member, failure);
  const bool first = told_.emplace(Pair{number, member}, Told{failure, hops_heard_}).second;
  EXPECT_TRUE(first) << "told twice";
  EXPECT_TRUE(isTrue(generations_[static_cast<size_t>(number)], failure))
      << "generation " << number << ", process " << member << " was told: " << failure.describe();
}

bool MonitorWorld::isTrue(const Generation& generation, const Failure& failure) const {
  const auto size = static_cast<int>(generation.members.size());
  const Cause& cause = failure.cause;
  if (cause.rank < 0 || cause.rank >= size || cause.other_rank >= size) return false;
  const int culprit = generation.members[static_cast<size_t>(cause.rank)];
  if (failure.kind == FailureKind::kAborted) return generation.aborters.count(culprit) > 0;
  if (failure.kind == FailureKind::kConnectionLost) {
    const int other = generation.members[static_cast<size_t>(cause.other_rank)];
    return ever_cut_.count(pairOf(culprit, other)) > 0 || wasHeardLate(generation, other);
  }
  return failure.kind == FailureKind::kPeerLost &&
         (ever_killed_.count(culprit) > 0 || ever_exited_.count(culprit) > 0 ||
          wasOutOfReach(generation, culprit));
}

// Frozen, or cut off from another member, for so long that it may be held for lost though it lives.
// The shortest silence that reaches the limit is that of a process that freezes just before its
// next beat, and whose beat after that takes longest; a probe begins to look up to one delay late.
bool MonitorWorld::wasOutOfReach(const Generation& generation, int process) const {
  const Duration limit = options_.heartbeat_limit;
  const Duration slowest = options_.longest_delay + options_.resent_after;
  const Duration patience =
      limit == Duration::zero() ? kLongestConnect : std::min<Duration>(limit, kLongestConnect);
  const auto absences = [](const auto& all, const auto& key) {
    const auto found = all.find(key);
    return found == all.end() ? Spans{} : found->second;
  };
  return std::any_of(generation.members.begin(), generation.members.end(), [&](int other) {
    if (other == process) return false;
    Spans spans = absences(frozen_, process);
    const Spans blocked = absences(blocked_, pairOf(process, other));
    spans.insert(spans.end(), blocked.begin(), blocked.end());
    return longestOf(std::move(spans)) >= patience - limit / kBeatsPerLimit - slowest;
  });
}

// What it sent since it thawed, or was lost and sent again, may come after the limit, though others
// have reached it: then the connection counts as lost. A process that did not run meanwhile does
// not.
bool MonitorWorld::wasHeardLate(const Generation& generation, int process) const {
  const auto found = frozen_.find(process);
  const Duration lately =
      2 * options_.heartbeat_limit + options_.longest_delay + options_.resent_after;
  const bool ran = found == frozen_.end() || found->second.back().to < Time::max() ||
                   now_ - found->second.back().from <= lately;
  return ran && wasOutOfReach(generation, process);
}

// What is too short for a probe to see counts as no pause.
Duration MonitorWorld::longestOf(Spans spans) const {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.from < b.from; });
  Duration longest{0};
  Span whole;
  for (const Span& span : spans) {
    if (&span == &spans.front() || span.from > whole.to + kProbeLook)
      whole = {span.from, span.from};
    whole.to = std::max(whole.to, std::min(span.to, now_));
    longest = std::max(longest, Duration(whole.to - whole.from));
  }
  return longest;
}

// ---------------------------------------------------------------- seeds

namespace {

uint32_t numberFrom(const char* variable, uint32_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : static_cast<uint32_t>(std::strtoul(text, nullptr, 10));
}

}  // namespace

uint32_t testSeed() {
  const uint32_t seed = numberFrom("TORCHFT_EXT_TEST_SEED", 1);
  std::cout << "TORCHFT_EXT_TEST_SEED=" << seed << std::endl;  // stands there even after a crash
  return seed;
}

uint32_t testProcesses(uint32_t otherwise) {
  return numberFrom("TORCHFT_EXT_TEST_PROCESSES", otherwise);
}

void forSeeds(uint32_t count, const std::function<void(uint32_t seed)>& run) {
  const uint32_t first = testSeed();
  const uint32_t seeds = numberFrom("TORCHFT_EXT_TEST_SEEDS", count);
  for (uint32_t seed = first; seed != first + seeds; ++seed) {
    SCOPED_TRACE("TORCHFT_EXT_TEST_SEED=" + std::to_string(seed));
    run(seed);
    if (::testing::Test::HasFailure()) break;
  }
}

}  // namespace torchft_ext

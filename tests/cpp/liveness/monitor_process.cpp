#include "cpp/liveness/monitor_process.h"

#include <algorithm>

namespace torchft_ext {

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

void MonitorWorld::Process::fail(WatchId watch, Failure failure) {
  world_.judge(static_cast<int>(watch), number_, failure);
}

void MonitorWorld::Process::retire(WatchId watch) {
  EXPECT_EQ(watches_.count(watch), 0U);
  expected_.erase(world_.generations_[watch].nonce);
}

// Its probes.

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

}  // namespace torchft_ext

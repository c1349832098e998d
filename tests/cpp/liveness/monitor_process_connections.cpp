// What LivenessTable does for a simulated process: connections, and what goes over them.
#include <algorithm>

#include "cpp/liveness/monitor_process.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kRedial{20};
constexpr milliseconds kGrace{500};

}  // namespace

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

}  // namespace torchft_ext

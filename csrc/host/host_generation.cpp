#include "host/host_generation.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "host/schedule.h"
#include "net/failure_frame.h"

namespace torchft_ext {
namespace {

constexpr Duration kFinalFrameWithin = std::chrono::seconds(1);
constexpr Duration kLookAtHeld = std::chrono::seconds(1);
constexpr Duration kLeavePoll = std::chrono::milliseconds(1);
// What nobody waits for: on a host with more processes than cores the end of a generation is over
// sooner if each process first wakes its waiters, and then all do the rest.
constexpr Duration kRestAfter = std::chrono::milliseconds(5);

FrameHeader textFrame(FrameType type, const std::string& payload = {}) {
  FrameHeader header;
  header.type = type;
  header.length = payload.size();
  return header;
}

Receipt refuse(std::string why) {
  Receipt receipt;
  receipt.why = std::move(why);
  return receipt;
}

Failure ended(std::string how) {
  Failure failure;
  failure.kind = FailureKind::kAborted;
  failure.cause.how = std::move(how);
  return failure;
}

}  // namespace

// Receives one peer's control channel, and sorts it: what the generation is told, and its messages.
struct HostGeneration::ControlChannel final : ConnectionReceiver {
  ControlChannel(HostGeneration& of, int from) : generation(of), rank(from) {}

  Receipt onHeader(const FrameHeader& header) override {
    switch (header.type) {
      case FrameType::kBarrier:
      case FrameType::kQuestion:
      case FrameType::kReport:
      case FrameType::kFailed:
      case FrameType::kGoodbye: {
        Receipt text;
        text.kind = Receipt::Kind::kText;
        return text;
      }
      case FrameType::kAnnounce:
      case FrameType::kClear:
      case FrameType::kMessage:
        if (generation.messages_) return generation.messages_->onHeader(rank, header);
        return refuse("a message before the generation has formed");
      default:
        return refuse("a frame of type " + std::to_string(static_cast<int>(header.type)) +
                      " on a control channel");
    }
  }
  void onFrame(const FrameHeader& header) override {
    if (generation.messages_) generation.messages_->onFrame(rank, header);
  }
  void onText(const FrameHeader& header, std::string payload) override {
    generation.onControlText(rank, header, payload);
  }
  void onBroken(const std::string& /*why*/, bool clean) override {
    generation.onChannelEnded(rank, kControl, clean);
  }

  HostGeneration& generation;
  const int rank;
};

HostGeneration::HostGeneration(HostGenerationSetup setup)
    : setup_(std::move(setup)),
      shared_processes_(std::make_shared<const SharedProcesses>(setup_.roster)),
      connections_(rank(), size()),
      long_waits_(std::make_shared<LongWaits>(*setup_.loop, setup_.lifecycle, setup_.roster,
                                              connections_)) {
  peers_.resize(static_cast<size_t>(size()));
}

HostGeneration::~HostGeneration() = default;

// ---------------------------------------------------------------- forming

void HostGeneration::start(FormingCallbacks callbacks) {
  forming_ = std::move(callbacks);
  const std::weak_ptr<HostGeneration> weak = weak_from_this();
  EventLoop* loop = setup_.loop;
  const bool may_end = !setup_.engine.expired();
  const std::weak_ptr<const void> engine = setup_.engine;
  subscription_ =
      setup_.lifecycle->subscribe([weak, loop, may_end, engine](const FailurePtr& failure) {
        const auto alive = engine.lock();
        if (may_end && !alive) return;
        loop->post([weak, failure] {
          if (auto self = weak.lock()) self->onLifecycleFailed(failure);
        });
      });
  break_classifier_ = std::make_unique<BreakClassifier>(
      *loop, setup_.roster, [this](int rank, FailureKind kind, const std::string& how) {
        onBreakClassified(rank, kind, how);
      });
  if (size() == 1) {
    allChannelsStand();
    return;
  }
  if (SharedGreeting::isFor(setup_.roster))
    greeting_ = std::make_unique<SharedGreeting>(*setup_.loop, rank(), size(), setup_.plans);
  Mesh::Callbacks mesh_callbacks;
  mesh_callbacks.arrived = [this](int rank, Channel channel, UniqueFd fd) {
    channelArrived(rank, channel, std::move(fd));
  };
  mesh_callbacks.failed = [this](int rank, const std::string& why, bool timed_out) {
    breakAttempt(unreached(rank, why, timed_out), false);
  };
  mesh_callbacks.starved = [this](const std::string& why) { lacks(why); };
  mesh_ =
      std::make_unique<Mesh>(*loop, setup_.listener, setup_.roster, rank(), setup_.local_sockets,
                             setup_.connect_by, std::move(mesh_callbacks));
}

Failure HostGeneration::unreached(int rank, const std::string& why, bool timed_out) const {
  if (timed_out && !setup_.deadline.expired()) {
    return lossOf(rank, FailureKind::kConnectionLost, "could not be made: " + why);
  }
  Failure failure;
  failure.kind = timed_out ? FailureKind::kTimeout : FailureKind::kRendezvous;
  failure.cause.rank = rank;
  failure.cause.how = "it could not be reached: " + why;
  return failure;
}

// Its own trouble, and not that of a peer: the others are told who has it.
void HostGeneration::lacks(const std::string& why) {
  if (state_ != State::kConnecting) return;
  breakAttempt(setup_.lifecycle->ownFailure(FailureKind::kRendezvous,
                                            "it cannot make its connections: " + why),
               false);
}

void HostGeneration::channelArrived(int rank, Channel channel, UniqueFd fd) {
  if (state_ != State::kConnecting) return;
  if (!greeting_ || channel != kCollective) return addChannel(rank, channel, std::move(fd));
  try {
    greeting_->greet(rank, std::move(fd), [this, rank, channel](UniqueFd met) {
      addChannel(rank, channel, std::move(met));
    });
  } catch (const std::exception& error) {
    lacks(error.what());
  }
}

void HostGeneration::addChannel(int rank, Channel channel, UniqueFd fd) {
  if (state_ != State::kConnecting) return;
  Connection* connection = nullptr;
  try {
    connection = connections_.add(rank, channel,
                                  makeStreamConnection(*setup_.loop, std::move(fd), traffic_));
  } catch (const std::exception& error) {  // the kernel or the heap has no more
    return lacks(error.what());
  }
  if (connection == nullptr) return;
  if (channel == kControl) {
    peer(rank).control = std::make_unique<ControlChannel>(*this, rank);
    connection->setReceiver(peer(rank).control.get());
  }
  if (connections_.allStand()) allChannelsStand();
}

// False: the generation has failed, before this member said its barrier.
bool HostGeneration::plansAreEqual() {
  const auto other = greeting_ ? greeting_->otherPlans() : std::nullopt;
  if (other) failPeer(other->rank, FailureKind::kMismatch, other->how);
  return !other;
}

void HostGeneration::allChannelsStand() {
  if (!plansAreEqual()) return;
  state_ = State::kBarrier;
  const std::vector<Connection*> control = connections_.along(kControl);
  ScheduleRunner::Callbacks callbacks;
  callbacks.failed = [this](Failure failure) { setup_.lifecycle->fail(std::move(failure)); };
  callbacks.broken = [this](int rank, const std::string& /*why*/, bool clean) {
    onChannelEnded(rank, kCollective, clean);
  };
  callbacks.left = [this](int rank, const FrameHeader& goodbye) {
    onCollectivesLeft(rank, goodbye);
  };
  callbacks.nudged = [this] {
    if (lane_) lane_->advance();
  };
  callbacks.exchanged = [this] {
    if (!held_.isDue(runner_->done())) return;
    setup_.loop->post([weak = weak_from_this()] {
      if (auto self = weak.lock()) self->failAsHeld();
    });
  };
  runner_ = std::make_unique<ScheduleRunner>(*setup_.loop, rank(), size(),
                                             connections_.along(kCollective), setup_.tuning,
                                             std::move(callbacks));
  collectives_ = runner_.get();
  if (greeting_) shared_memory_ = greeting_->memory();
  messages_ = std::make_unique<Messages>(
      rank(), control,
      Messages::Callbacks{
          [this](Failure failure) { setup_.lifecycle->fail(std::move(failure)); },
          [loop = setup_.loop](std::function<void()> task) { loop->post(std::move(task)); }});
  nested_ = std::make_unique<NestedCollectives>(
      rank(), size(), *messages_, setup_.tuning,
      Messages::Callbacks{
          [this](Failure failure) { setup_.lifecycle->fail(std::move(failure)); },
          [loop = setup_.loop](std::function<void()> task) { loop->post(std::move(task)); }});
  FrameHeader barrier = textFrame(FrameType::kBarrier);
  if (shared_memory_) barrier.aux = 1;
  for (Connection* connection : control) {
    if (connection != nullptr) connection->sendText(barrier, {});
  }
  maybeUp();
}

void HostGeneration::maybeUp() {
  if (state_ != State::kBarrier) return;
  for (int other = 0; other < size(); ++other) {
    const Peer& candidate = peer(other);
    if (other != rank() && (!candidate.barrier_seen || candidate.gave_up)) return;
  }
  becomeUp(allShareMemory());
}

bool HostGeneration::allShareMemory() const {
  for (int other = 0; other < size(); ++other) {
    if (other != rank() && !peers_[static_cast<size_t>(other)].shares_memory) return false;
  }
  return shared_memory_ != nullptr;
}

// Who was up had the barriers of all: the generation has formed, though some are still on their way
// here.
void HostGeneration::passIfPassedBy(const FrameHeader& final_frame) {
  if ((final_frame.aux & kFinalFrameWasUp) != 0 && state_ == State::kBarrier)
    becomeUp((final_frame.aux & kFinalFrameShared) != 0);
}

void HostGeneration::becomeUp(bool shared) {
  state_ = State::kUp;
  const auto memory = std::exchange(shared_memory_, nullptr);
  if (shared && memory) startLane(memory, greeting_->fewCores());
  if (size() > 1 && !lane_) noteThatMemoryIsNotShared();
  greeting_.reset();
  // first: the monitor may know at once that the generation has ended
  if (forming_.up) forming_.up();
  forming_ = {};
  if (size() > 1)
    long_waits_->begin(
        {collectives_, messages_.get(), [this](int rank) { return peer(rank).left; }}, poster());
  startMonitor();
  if (lost_while_forming_) setup_.lifecycle->fail(*lost_while_forming_);
}

// Other threads post through it: the loop may be gone with its engine.
std::function<bool(EventLoop::Task)> HostGeneration::poster() const {
  return [loop = setup_.loop, engine = setup_.engine,
          may_end = !setup_.engine.expired()](EventLoop::Task task) {
    const auto alive = engine.lock();
    return (alive || !may_end) && loop->post(std::move(task));
  };
}

void HostGeneration::startLane(std::shared_ptr<SharedMemory> memory, bool few_cores) {
  const std::weak_ptr<HostGeneration> weak = weak_from_this();
  const auto post = poster();
  SharedLane::Callbacks callbacks;
  callbacks.exchanged = [weak, post] {
    post([weak] {
      if (const auto self = weak.lock()) self->onExchanged();
    });
  };
  callbacks.post = [weak, post] {
    return post([weak] {
      const auto self = weak.lock();
      if (self && self->lane_) self->lane_->advance();
    });
  };
  callbacks.nudge = [weak, post](int peer) {
    post([weak, peer] {
      if (const auto self = weak.lock()) self->nudge(peer);
    });
  };
  setup_.use->generations.fetch_add(1, std::memory_order_relaxed);
  SharedLane::Terms terms{setup_.plans.plansFor(size(), few_cores), few_cores, setup_.use};
  lane_ = std::make_shared<SharedLane>(std::move(memory), rank(), size(), std::move(terms),
                                       setup_.lifecycle, traffic_, std::move(callbacks));
  collectives_ = lane_.get();
  setup_.lifecycle->subscribe([lane = std::weak_ptr<SharedLane>(lane_)](const FailurePtr&) {
    if (const auto alive = lane.lock()) alive->wakeExecutor();
  });
}

void HostGeneration::noteThatMemoryIsNotShared() {
  why_over_sockets_ =
      greeting_ ? greeting_->why() : SharedGreeting::whyNotFor(setup_.roster, rank());
  for (int other = 0; why_over_sockets_.empty() && other < size(); ++other) {
    if (other != rank() && !peers_[static_cast<size_t>(other)].shares_memory)
      why_over_sockets_ = "rank " + std::to_string(other) + " cannot";
  }
  if (!greeting_) return;  // as was chosen, or as their places are
  log(LogLevel::kInfo,
      "group '" + setup_.lifecycle->identity().group +
          "': collectives run over sockets, not in shared memory: " + why_over_sockets_);
}

void HostGeneration::nudge(int rank) {
  if (state_ != State::kUp) return;
  Connection* connection = connections_.along(kCollective)[static_cast<size_t>(rank)];
  if (connection != nullptr) connection->sendText(textFrame(FrameType::kNudge), {});
}

void HostGeneration::startMonitor() {
  if (!setup_.monitor || size() == 1) return;
  std::vector<MonitoredPeer> watched;
  for (int other = 0; other < size(); ++other) {
    const MemberRecord& member = setup_.roster.members[static_cast<size_t>(other)];
    if (other == rank()) continue;
    watched.push_back(
        {other, member.incarnation, member.host, member.pid, member.liveness_addresses});
  }
  const bool reaches_all = std::none_of(watched.begin(), watched.end(), [](const auto& member) {
    return member.liveness_addresses.empty();
  });
  const std::weak_ptr<Lifecycle> weak = setup_.lifecycle;
  watch_ = setup_.monitor->watch(
      setup_.roster.nonce, setup_.roster.secret, rank(), std::move(watched),
      [weak, reaches_all, others_are_told = others_are_told_,
       shared_processes = shared_processes_](Failure failure) {
        shared_processes->nameIn(failure);
        if (reaches_all) *others_are_told = true;  // first: the loop looks once it has failed
        if (auto lifecycle = weak.lock()) lifecycle->fail(std::move(failure));
      });
}

void HostGeneration::breakAttempt(const Failure& failure, bool superseded) {
  if (forming_.broken) forming_.broken(failure, superseded);
}

std::vector<int> HostGeneration::missingRanks() const {
  std::vector<int> missing;
  std::vector<int> connected;  // but waiting for others themselves
  for (int other = 0; other < size(); ++other) {
    const Peer& candidate = peers_[static_cast<size_t>(other)];
    if (other == rank() || candidate.barrier_seen) continue;
    (connections_.stand(other) ? connected : missing).push_back(other);
  }
  return missing.empty() ? connected : missing;
}

// ---------------------------------------------------------------- running

void HostGeneration::issue(std::shared_ptr<OpState> state, Operation operation) {
  if (state_ != State::kUp) {
    FailurePtr failure = setup_.lifecycle->failure();
    if (!failure) failure = std::make_shared<Failure>(ended("the generation has ended"));
    state->complete(state->inPlace(failure));
    return;
  }
  const bool ordered = isCollective(operation.kind) && operation.name == 0;
  // Of these a member may have done its part, and left, before others begin.
  const bool is_rooted = hasRoot(operation.kind);
  if (operation.watches) {
    watches_.add(std::move(state));
  } else if (operation.name != 0) {
    nested_->add(std::move(state), std::move(operation));
  } else if (operation.kind == OpKind::kSend) {
    messages_->send(std::move(state), std::move(operation));
  } else if (operation.kind == OpKind::kRecv) {
    messages_->recv(std::move(state), std::move(operation));
  } else {
    collectives_->add(std::move(state), std::move(operation));
  }
  if (!ordered) failAsHeld();
  for (int other = 0; other < size() && state_ == State::kUp; ++other) {
    const Peer& candidate = peer(other);
    const bool unfinished = is_rooted ? collectives_->needs(other) : !collectives_->idle();
    const bool needed = (candidate.left && needsMessagesOf(other)) ||
                        (ordered && candidate.collectives_left && unfinished);
    if (needed) failLeaver(other, "it left before this operation");
    if (candidate.left) tellWatches(other);
  }
}

// ---------------------------------------------------------------- what members say

void HostGeneration::onControlText(int rank, const FrameHeader& header,
                                   const std::string& payload) {
  if (state_ == State::kOver) {
    const bool departs = header.type == FrameType::kGoodbye;
    if (departs && watch_) watch_->peerLeft(rank);  // its end is no death
    return;
  }
  if (header.type == FrameType::kBarrier) {
    peer(rank).barrier_seen = true;
    peer(rank).shares_memory = header.aux == 1;
    maybeUp();
  } else if (header.type == FrameType::kFailed) {
    onFailedFrame(rank, header, payload);
  } else if (header.type == FrameType::kGoodbye) {
    onGoodbye(rank, header);
  } else if (header.type == FrameType::kQuestion) {
    long_waits_->onQuestion(rank, header.seq);
  } else if (header.type == FrameType::kReport) {
    if (!long_waits_->onReport(rank, payload))
      failPeer(rank, FailureKind::kInternal, "it sent a malformed report");
  } else if (messages_) {
    messages_->onText(rank, header, payload);
  }
}

void HostGeneration::onFailedFrame(int rank, const FrameHeader& header,
                                   const std::string& payload) {
  std::optional<Failure> failure = decodeFailure(payload, size());
  if (!failure) {
    failPeer(rank, FailureKind::kInternal, "it sent a malformed failure notice");
    return;
  }
  passIfPassedBy(header);
  if (mayHold(rank, header)) return hold(rank, header.seq, std::move(*failure));
  // Who has failed while it formed tells only those it is connected to.
  if (state_ == State::kUp) *others_are_told_ = true;
  setup_.lifecycle->fail(std::move(*failure));
}

bool HostGeneration::mayHold(int rank, const FrameHeader& failed) const {
  const Peer& teller = peers_[static_cast<size_t>(rank)];
  const bool all_comes =
      teller.all_read && !(teller.collectives_ended && collectives_->needsNow(rank));
  return state_ == State::kUp && (failed.aux & kFinalFrameOfLeaver) != 0 && !told_of_leavers_ &&
         collectives_->done() < failed.seq && all_comes && messages_->idle() && nested_->idle() &&
         watches_.idle();
}

void HostGeneration::hold(int rank, uint64_t exchanges, Failure failure) {
  const bool first = !held_.holds();
  held_.hold(rank, exchanges, std::move(failure));
  collectives_->watchFor(exchanges);
  if (held_.isDue(collectives_->done())) return failAsHeld();
  if (lane_) lane_->post();  // its last nudge may have been dropped with its generation
  if (watch_) watch_->peerLeft(rank);
  break_classifier_->forget(rank);
  if (first) lookWhetherStuck();
}

// What the tellers had sent comes, or their connections end; unless their host is gone, or the way
// to it.
void HostGeneration::lookWhetherStuck() {
  setup_.loop->runAt(Clock::now() + kLookAtHeld, [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self || self->state_ != State::kUp || !self->held_.holds()) return;
    const auto needs = [&self](int teller) { return self->collectives_->needsNow(teller); };
    if (self->held_.isStuck(self->collectives_->done(), needs)) return self->failAsHeld();
    self->lookWhetherStuck();
  });
}

// The lane has done as many exchanges as a leaver, or a held failure, allows.
void HostGeneration::onExchanged() {
  if (state_ != State::kUp) return;
  if (held_.isDue(collectives_->done())) return failAsHeld();
  for (int other = 0; other < size() && state_ == State::kUp; ++other) {
    if (peer(other).collectives_left && collectives_->needs(other))
      failLeaver(other, "it left before this operation");
  }
}

bool HostGeneration::endsForWantOfLeaver(const Failure& failure) const {
  return state_ == State::kUp && failure.kind == FailureKind::kPeerLeft && !told_of_leavers_;
}

void HostGeneration::failAsHeld() {
  if (state_ != State::kUp || !held_.holds()) return;
  *others_are_told_ = true;
  setup_.lifecycle->fail(held_.take());
}

void HostGeneration::onGoodbye(int rank, const FrameHeader& goodbye) {
  passIfPassedBy(goodbye);
  if (state_ != State::kUp) {
    peer(rank).gave_up = true;
    Failure failure;
    failure.kind = FailureKind::kPeerLeft;
    failure.cause.rank = rank;
    failure.cause.how = "it gave up this attempt to form the generation";
    breakAttempt(failure, true);
    return;
  }
  peer(rank).left = true;
  peerDidAll(rank, goodbye);
  noteGoodbyeKind(rank, goodbye);
  if (watch_) watch_->peerLeft(rank);
  messages_->peerLeft(rank);
  if (told_of_leavers_) told_of_leavers_(rank, peer(rank).begins_another);
  if (needsMessagesOf(rank)) failLeaver(rank, "it left before its send or recv was done");
  if (state_ == State::kUp) tellWatches(rank);
}

// A goodbye comes before the last nudge, or in its place.
void HostGeneration::peerDidAll(int rank, const FrameHeader& goodbye) {
  collectives_->peerLeft(rank, goodbye.seq);
  if (lane_) lane_->post();
}

void HostGeneration::tellWatches(int leaver) {
  if (!watches_.wantToKnow(leaver)) return;
  const Peer& gone = peer(leaver);
  const FailureKind kind = gone.begins_another ? FailureKind::kAborted : FailureKind::kPeerLeft;
  const std::string how = gone.begins_another ? kBeganAnother : "it left";
  watches_.tell(leaver, std::make_shared<Failure>(lossOf(leaver, kind, how)));
}

void HostGeneration::tellOfLeavers(ControlCommunicator::OnPeerLeft told) {
  if (state_ == State::kOver) return;
  told_of_leavers_ = std::move(told);
  for (int rank = 0; rank < size(); ++rank) {
    if (peer(rank).left) told_of_leavers_(rank, peer(rank).begins_another);
  }
}

void HostGeneration::onCollectivesLeft(int rank, const FrameHeader& goodbye) {
  passIfPassedBy(goodbye);
  if (state_ != State::kUp) return;
  peer(rank).collectives_left = true;
  peerDidAll(rank, goodbye);
  noteGoodbyeKind(rank, goodbye);
  if (collectives_->needs(rank)) failLeaver(rank, "it left before it had done its part");
}

void HostGeneration::noteGoodbyeKind(int rank, const FrameHeader& goodbye) {
  if ((goodbye.aux & kFinalFrameBeginsAnother) != 0) peer(rank).begins_another = true;
}

void HostGeneration::failLeaver(int rank, const std::string& how) {
  if (peer(rank).begins_another) {
    failPeer(rank, FailureKind::kAborted, kBeganAnother);
  } else {
    failPeer(rank, FailureKind::kPeerLeft, how);
  }
}

// ---------------------------------------------------------------- ends

void HostGeneration::onChannelEnded(int rank, Channel channel, bool clean) {
  if (state_ == State::kOver) return;
  Peer& gone = peer(rank);
  if (channel == kCollective) {
    gone.collectives_ended = true;
    gone.all_read = clean;
  }
  if (held_.isFrom(rank)) {
    if (channel == kCollective && (!clean || collectives_->needsNow(rank))) failAsHeld();
    return;
  }
  if (gone.left || gone.collectives_left) {
    // whether or not its goodbye was read
    if (channel == kCollective) gone.collectives_left = true;
    const bool needed = channel == kCollective ? collectives_->needs(rank) : needsMessagesOf(rank);
    if (needed) failLeaver(rank, "it left before it had done its part");
    return;
  }
  if (state_ == State::kUp || !gone.gave_up) break_classifier_->channelEnded(rank, channel);
}

// While the generation forms, another attempt may have taken its place; this one is broken either
// way.
void HostGeneration::onBreakClassified(int rank, FailureKind kind, const std::string& how) {
  if (state_ == State::kUp) return failPeer(rank, kind, how);
  lost_while_forming_ = lossOf(rank, kind, how + ", while the generation formed");
  breakAttempt(*lost_while_forming_, false);
}

Failure HostGeneration::lossOf(int rank, FailureKind kind, const std::string& how) const {
  const MemberRecord& member = setup_.roster.members[static_cast<size_t>(rank)];
  Failure failure;
  failure.kind = kind;
  failure.cause = {rank, kind == FailureKind::kConnectionLost ? this->rank() : -1, member.host,
                   member.pid, how};
  shared_processes_->nameIn(failure);
  return failure;
}

void HostGeneration::failPeer(int rank, FailureKind kind, const std::string& how) {
  setup_.lifecycle->fail(lossOf(rank, kind, how));
}

void HostGeneration::onLifecycleFailed(const FailurePtr& failure) {
  if (state_ == State::kOver) return;
  final_frame_.payload = encodeFailure(*failure);
  final_frame_.frame = textFrame(FrameType::kFailed, final_frame_.payload);
  if (state_ == State::kUp) final_frame_.frame.aux = kFinalFrameWasUp;
  if (lane_) final_frame_.frame.aux |= kFinalFrameShared;
  Collectives::Pending pending;
  if (collectives_ != nullptr) pending = collectives_->cancelAll();
  if (endsForWantOfLeaver(*failure)) {
    final_frame_.frame.aux |= kFinalFrameOfLeaver;
    final_frame_.frame.seq = collectives_->done();
  } else {
    final_frame_.announced = failure;
  }
  connections_.detachBuffers(kControl);
  if (messages_) {
    for (auto& entry : nested_->cancelAll()) pending.push_back(std::move(entry));
    for (auto& entry : messages_->cancelAll()) pending.push_back(std::move(entry));
  }
  connections_.close(kCollective);
  const bool later = *others_are_told_;
  if (!later) sendFinalFrame();
  for (auto& [state, operation] : pending) state->complete(state->inPlace(failure));
  watches_.end(failure);
  becomeOver(later ? kRestAfter : Duration::zero());
}

void HostGeneration::becomeOver(Duration rest_after) {
  state_ = State::kOver;
  forming_ = {};
  told_of_leavers_ = nullptr;
  long_waits_->end();
  greeting_.reset();
  shared_memory_.reset();
  mesh_.reset();
  break_classifier_.reset();
  {
    MutexLock lock(drained_mutex_);
    drained_ = true;
    drained_changed_.notifyAll();
  }
  if (rest_after <= Duration::zero()) return sendFinalFrame();
  setup_.loop->runAt(Clock::now() + rest_after,
                     [self = shared_from_this()] { self->sendFinalFrame(); });
}

// Once. Then nothing follows on these connections. They need this object until all has been sent.
void HostGeneration::sendFinalFrame() {
  if (std::exchange(final_frame_.said, true)) return;
  connections_.sayLast(final_frame_.frame, final_frame_.payload, kFinalFrameWithin);
  // A second, independent way; the first to arrive wins.
  if (watch_ && final_frame_.announced) watch_->announce(*final_frame_.announced);
  watch_.reset();
  setup_.loop->runAt(Clock::now() + kFinalFrameWithin + std::chrono::milliseconds(100),
                     [self = shared_from_this()] { self->close(); });
}

bool HostGeneration::waitDrained(Deadline deadline) {
  if (setup_.loop->inLoop()) return true;
  {
    MutexLock lock(drained_mutex_);
    while (!drained_ && !deadline.expired()) drained_changed_.waitUntil(drained_mutex_, deadline);
    if (!drained_) return false;
  }
  return !lane_ || lane_->awaitLeft(deadline);
}

bool HostGeneration::idle() const {
  return collectives_->idle() && nested_->idle() && messages_->idle();
}

bool HostGeneration::needsMessagesOf(int rank) const {
  return messages_->needs(rank) || nested_->needs(rank);
}

bool HostGeneration::everythingSent() const {
  return idle() && connections_.everythingSent();
}

void HostGeneration::leave(GoodbyeKind goodbye_kind, std::function<void(bool left)> told) {
  const bool waits = goodbye_kind == GoodbyeKind::kForGood || state_ == State::kOver;
  if (!waits && !idle()) return told(false);
  // Who shuts down while another thread begins a generation leaves for good.
  if (leaving_.empty() || goodbye_kind == GoodbyeKind::kForGood) goodbye_kind_ = goodbye_kind;
  leaving_.push_back(std::move(told));
  if (leaving_.size() == 1 || state_ == State::kOver) leaveWhenIdle();
}

void HostGeneration::haveLeft() {
  for (const auto& told : std::exchange(leaving_, {})) told(true);
}

void HostGeneration::leaveWhenIdle() {
  if (state_ == State::kOver) return haveLeft();
  if (state_ == State::kUp && everythingSent()) {
    sayGoodbye();
    return;
  }
  if (lane_) lane_->post();
  setup_.loop->runAt(Clock::now() + kLeavePoll, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->leaveWhenIdle();
  });
}

void HostGeneration::sayGoodbye() {
  if (setup_.lifecycle->end()) {
    const bool for_good = goodbye_kind_ == GoodbyeKind::kForGood;
    // Another thread may have issued one just now.
    const auto left = std::make_shared<Failure>(ended("the generation has ended"));
    for (auto& [state, operation] : collectives_->cancelAll())
      state->complete(state->inPlace(left));
    final_frame_.frame = textFrame(FrameType::kGoodbye);
    final_frame_.frame.aux = kFinalFrameWasUp | (for_good ? 0 : kFinalFrameBeginsAnother) |
                             (lane_ ? kFinalFrameShared : 0);
    final_frame_.frame.seq = collectives_->done();
    watches_.end(std::make_shared<Failure>(ended("this rank left it")));
    // The connections stand meanwhile: nothing of the user's is on them, and others say goodbye
    // there.
    becomeOver(for_good ? Duration::zero() : kRestAfter);
  }
  haveLeft();
}

// News of the failure is on its way here, and may find nobody any more.
void HostGeneration::abandon() {
  if (const FailurePtr failure = setup_.lifecycle->failure()) onLifecycleFailed(failure);
}

// It stays alive by the task or the timer that runs this, until everything has been sent.
void HostGeneration::dropped(const Failure& failure, Deadline send_by) {
  abandon();
  if (state_ == State::kOver) return;
  if (state_ != State::kUp || !idle() || send_by.expired()) {
    setup_.lifecycle->fail(failure);
    return abandon();
  }
  if (connections_.everythingSent()) return sayGoodbye();
  setup_.loop->runAt(Clock::now() + kLeavePoll, [self = shared_from_this(), failure, send_by] {
    self->dropped(failure, send_by);
  });
}

bool HostGeneration::tellOfFailure() {
  abandon();
  if (state_ != State::kOver) return false;
  sendFinalFrame();
  const FailurePtr& failure = final_frame_.announced;
  const bool gone = failure && failure->kind == FailureKind::kPeerLost;
  return connections_.everythingArrived(gone ? failure->cause.rank : -1);
}

// The loop looks at its descriptors first and then at its tasks, but reads no more than so much of
// each at a turn.
void HostGeneration::whenRead(std::function<void()> then, int turns) {
  auto shared_then = std::make_shared<std::function<void()>>(std::move(then));
  const bool posted = setup_.loop->post([self = shared_from_this(), shared_then, turns] {
    if (turns > 1 && self->state_ == State::kUp && !self->connections_.everythingRead())
      return self->whenRead(std::move(*shared_then), turns - 1);
    (*shared_then)();
  });
  if (!posted) (*shared_then)();
}

void HostGeneration::dissolve() {
  abandon();
  if (state_ == State::kOver) return;
  setup_.lifecycle->unsubscribe(subscription_);
  final_frame_.frame = textFrame(FrameType::kGoodbye);
  connections_.detachBuffers(kControl);
  connections_.close(kCollective);
  becomeOver(Duration::zero());
}

void HostGeneration::close() {
  if (state_ != State::kOver) {
    Failure failure;
    failure.kind = FailureKind::kAborted;
    failure.cause.rank = rank();
    failure.cause.how = "its process shut the engine down";
    setup_.lifecycle->fail(std::move(failure));
    if (FailurePtr known = setup_.lifecycle->failure()) onLifecycleFailed(known);
  }
  if (state_ == State::kOver) sendFinalFrame();
  runner_.reset();
  nested_.reset();
  messages_.reset();
  connections_.drop();
}

}  // namespace torchft_ext

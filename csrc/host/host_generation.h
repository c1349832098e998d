// One generation on the network thread: its connections, what runs over them, and how it ends.
//
// States (loop thread):
// clang-format off
//   connecting  Channels arrive one by one. If one ends here, the attempt fails, and not yet the
//               generation.
//   barrier     All channels stand. Waits for kBarrier of every peer, or for the final frames of a
//               peer that was up already.
//   up          Operations run.
//   over        Nothing touches user memory any more. Connections send their final frames and
//               close. A member that was notified of the end by another one, or that goes on to
//               another generation, does so 5 ms later: the core belongs to waiters first.
// clang-format on
//
// Transitions: connecting -> barrier -> up -> over, and from each state to over:
// clang-format off
//   the lifecycle failed  (in any thread; posted here) Every peer is sent the reason (kFailed), and
//                         operations complete with it.
//   leave()               Everything issued has completed and is sent; goodbyes are said. So by
//                         dropped() of an idle one.
//   dissolve()            A forming attempt is given up quietly: peers wait for its successor.
// clang-format on
//
// If another member reports a failure caused by a member that left, this member first does as many
// exchanges as the reporter had done (HeldFailure). It does not wait if operations of any other
// kind, or of an engine above, are under way.
//
// Owner: the communicator (or the attempt that forms it), and tasks under way, the final frames
// among them; destroyed on the loop. Threads: loop only, but for waitDrained(). It never blocks.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/control_communicator.h"
#include "host/break_classifier.h"
#include "host/generation_connections.h"
#include "host/held_failure.h"
#include "host/long_waits.h"
#include "host/member_watches.h"
#include "host/mesh.h"
#include "host/messages.h"
#include "host/nested_collectives.h"
#include "host/schedule_runner.h"
#include "host/shared_greeting.h"
#include "host/shared_lane.h"
#include "host/shared_processes.h"
#include "liveness/peer_monitor.h"

namespace torchft_ext {

struct HostGenerationSetup {
  EventLoop* loop = nullptr;
  // Owns the loop, and may go while the lifecycle is told of a failure. Empty: it outlives that.
  std::weak_ptr<const void> engine;
  std::shared_ptr<Listener> listener;
  std::shared_ptr<PeerMonitor> monitor;  // may be null
  Roster roster;
  std::shared_ptr<Lifecycle> lifecycle;
  bool local_sockets = true;  // connect through them where a peer offers one
  ScheduleTuning tuning;
  SharedPlanTable plans;
  std::shared_ptr<SharedUse> use = std::make_shared<SharedUse>();  // of the engine's generations
  Deadline deadline = Deadline::never();                           // of forming
  // All members have come: a connection that does not stand by then cannot be made.
  Deadline connect_by = Deadline::never();
};

class HostGeneration : public std::enable_shared_from_this<HostGeneration> {
 public:
  // Told to the attempt, on the loop. up(): once. broken(): a forming attempt cannot succeed any
  // more.
  struct FormingCallbacks {
    std::function<void()> up;
    std::function<void(const Failure&, bool superseded)> broken;
  };

  explicit HostGeneration(HostGenerationSetup setup);
  ~HostGeneration();
  HostGeneration(const HostGeneration&) = delete;
  HostGeneration& operator=(const HostGeneration&) = delete;

  void start(FormingCallbacks callbacks);
  const Roster& roster() const { return setup_.roster; }  // constant: any thread
  std::vector<int> missingRanks() const;  // of which a channel is missing; else: the barrier
  void issue(std::shared_ptr<OpState> state, Operation operation);
  void tellOfLeavers(ControlCommunicator::OnPeerLeft told);  // at once of those who have left
  // A turn reads up to 1 MiB of a connection: more than a socket's buffer holds.
  static constexpr int kTurnsToRead = 64;
  enum class GoodbyeKind { kForGood, kForAnotherGeneration };
  // told(true): it has left, and goodbye is said or will be; false: not idle, and this goodbye does
  // not wait for that.
  void leave(GoodbyeKind goodbye_kind, std::function<void(bool left)> told);
  void dissolve();
  // If the lifecycle has failed, this generation is over now, and its final frames are said. True:
  // they have arrived with all but whom the failure counts as lost.
  bool tellOfFailure();
  // `then` runs once what had come from the members by now has been read.
  void whenRead(std::function<void()> then, int turns = kTurnsToRead);
  // Its owner has gone, without leave(). An idle generation says goodbye, as members may still
  // exchange among themselves. One with operations under way fails with this, and so does one whose
  // last bytes a member has not taken by `send_by`.
  void dropped(const Failure& failure, Deadline send_by);
  void close();  // over, at once; fails the lifecycle if it is not over yet
  int connectionCount() const { return connections_.count(); }
  const Traffic& traffic() const { return *traffic_; }                          // any thread
  std::vector<Duration> waitedFor() const { return long_waits_->waitedFor(); }  // any thread
  // Of a generation that has been up; null: its collectives run over its connections. Any thread.
  const std::shared_ptr<SharedLane>& lane() const { return lane_; }
  const std::string& whyOverSockets() const { return why_over_sockets_; }  // once it is up

  // Any thread. True: over, every operation completed.
  bool waitDrained(Deadline deadline);

 private:
  enum class State { kConnecting, kBarrier, kUp, kOver };
  struct ControlChannel;
  struct Peer {
    std::unique_ptr<ControlChannel> control;
    bool barrier_seen = false;
    bool shares_memory = false;      // as its barrier said
    bool gave_up = false;            // this attempt to form the generation: it will never be up
    bool left = false;               // said goodbye on the control channel
    bool collectives_left = false;   // said goodbye on the collective channel, after all its data
    bool collectives_ended = false;  // that channel has
    bool all_read = true;            // it stands, or has ended in order
    bool begins_another = false;     // its goodbye is not for good
  };

  // What the others are told on every channel that stands, once, when it is over.
  struct FinalFrame {
    FrameHeader frame;
    std::string payload;
    FailurePtr announced;  // to the monitor too; null: it ends nothing at once
    bool said = false;
  };

  int rank() const { return setup_.lifecycle->identity().rank; }
  int size() const { return setup_.lifecycle->identity().size; }
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }

  void channelArrived(int rank, Channel channel, UniqueFd fd);
  void addChannel(int rank, Channel channel, UniqueFd fd);
  void lacks(const std::string& why);
  void allChannelsStand();
  void startMonitor();
  void maybeUp();
  void passIfPassedBy(const FrameHeader& final_frame);
  bool allShareMemory() const;
  void becomeUp(bool shared);
  void startLane(std::shared_ptr<SharedMemory> memory, bool few_cores);
  bool plansAreEqual();
  std::function<bool(EventLoop::Task)> poster() const;
  void noteThatMemoryIsNotShared();
  void nudge(int rank);
  void peerDidAll(int rank, const FrameHeader& goodbye);
  void breakAttempt(const Failure& failure, bool superseded);

  void onControlText(int rank, const FrameHeader& header, const std::string& payload);
  void onFailedFrame(int rank, const FrameHeader& header, const std::string& payload);
  bool mayHold(int rank, const FrameHeader& failed) const;
  void hold(int rank, uint64_t exchanges, Failure failure);
  void lookWhetherStuck();
  void onExchanged();
  bool endsForWantOfLeaver(const Failure& failure) const;
  void failAsHeld();
  void onGoodbye(int rank, const FrameHeader& goodbye);
  // From either channel.
  void onChannelEnded(int rank, Channel channel, bool clean);
  void onBreakClassified(int rank, FailureKind kind, const std::string& how);
  Failure lossOf(int rank, FailureKind kind, const std::string& how) const;
  Failure unreached(int rank, const std::string& why, bool timed_out) const;
  void failPeer(int rank, FailureKind kind, const std::string& how);
  void onCollectivesLeft(int rank, const FrameHeader& goodbye);
  void noteGoodbyeKind(int rank, const FrameHeader& goodbye);
  void failLeaver(int rank, const std::string& how);

  void onLifecycleFailed(const FailurePtr& failure);
  void tellWatches(int leaver);
  void becomeOver(Duration rest_after);
  void sendFinalFrame();
  void leaveWhenIdle();
  void abandon();  // if the lifecycle has failed, this generation is over now
  void sayGoodbye();
  void haveLeft();
  bool everythingSent() const;
  bool idle() const;
  // A pending send, recv, or collective of a callback waits for this peer.
  bool needsMessagesOf(int rank) const;

  HostGenerationSetup setup_;
  const std::shared_ptr<const SharedProcesses> shared_processes_;
  FormingCallbacks forming_;
  State state_ = State::kConnecting;
  std::unique_ptr<Mesh> mesh_;
  GenerationConnections connections_;
  const std::shared_ptr<LongWaits> long_waits_;
  const std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();  // of the connections
  std::vector<Peer> peers_;
  std::unique_ptr<SharedGreeting> greeting_;     // while it forms, of members of one host
  std::shared_ptr<SharedMemory> shared_memory_;  // from the barrier until it is up
  std::unique_ptr<ScheduleRunner> runner_;
  std::shared_ptr<SharedLane> lane_;
  std::string why_over_sockets_;
  Collectives* collectives_ = nullptr;  // one of the two, from the barrier on
  std::unique_ptr<Messages> messages_;
  std::unique_ptr<NestedCollectives> nested_;  // over messages_
  MemberWatches watches_;
  HeldFailure held_;
  std::unique_ptr<PeerMonitor::Watch> watch_;
  std::unique_ptr<BreakClassifier> break_classifier_;  // until it is over
  std::optional<Failure> lost_while_forming_;
  Lifecycle::Subscription subscription_ = 0;
  GoodbyeKind goodbye_kind_ = GoodbyeKind::kForGood;
  std::vector<std::function<void(bool left)>> leaving_;  // who waits for the goodbye
  ControlCommunicator::OnPeerLeft told_of_leavers_;
  FinalFrame final_frame_;
  // Of the failure that this one was told of, by a member's final frames or the monitor.
  const std::shared_ptr<std::atomic<bool>> others_are_told_ =
      std::make_shared<std::atomic<bool>>(false);

  Mutex drained_mutex_;
  CondVar drained_changed_;
  bool drained_ GUARDED_BY(drained_mutex_) = false;
};

}  // namespace torchft_ext

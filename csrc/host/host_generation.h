// One generation on the network thread: its links, what runs over them, and how it ends.
//
// States (loop thread):
//   linking   lanes arrive one by one; a lane's end here breaks the attempt, not yet the generation
//   barrier   all lanes stand; waits for every peer's kBarrier, or the last words of one who was up
//   up        operations run
//   over      nothing touches user memory any more; links say their last words and close. Whoever
//             was told of the end by another, or goes on to another generation, does so 5 ms later:
//             the core belongs to waiters first
// Transitions: linking -> barrier -> up -> over, and from each to over:
//   the lifecycle failed   (any thread; posted here) every peer is told why (kFailed), operations
//                          complete with it
//   leave()                everything issued has completed and is sent, goodbyes are said
//   dissolve()             a forming attempt is given up quietly: peers wait for its successor
//
// Owner: the communicator (or the attempt that forms it), and tasks under way, the last words among
// them; destroyed on the loop. Threads: loop only, but for waitDrained(). It never blocks.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "host/generation_links.h"
#include "host/link_judge.h"
#include "host/mesh.h"
#include "host/messages.h"
#include "host/nested_collectives.h"
#include "host/schedule_runner.h"
#include "peers/peer_monitor.h"

namespace torchft_ext {

struct HostGenerationSetup {
  EventLoop* loop = nullptr;
  std::shared_ptr<Listener> listener;
  std::shared_ptr<PeerMonitor> monitor;  // may be null
  Roster roster;
  std::shared_ptr<Lifecycle> lifecycle;
  bool local_sockets = true;  // connect through them where a peer offers one
  ScheduleTuning tuning;
  Deadline deadline = Deadline::never();  // of forming
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
  std::vector<int> missingRanks() const;  // of which a lane is missing; else: the barrier
  void issue(std::shared_ptr<OpState> state, Operation operation);
  void tellOfLeavers(Communicator::OnPeerLeft told);  // at once of those who have left
  // A turn reads up to 1 MiB of a link: more than a socket's buffer holds.
  static constexpr int kTurnsToRead = 64;
  enum class Farewell { kForGood, kForAnotherGeneration };
  // told(true): it has left, and goodbye is said or will be; false: not idle, and this goodbye does
  // not wait for that.
  void leave(Farewell farewell, std::function<void(bool left)> told);
  void dissolve();
  // If the lifecycle has failed, this generation is over now, and its last words are said. True:
  // they have arrived with all but whom the failure counts as lost.
  bool tellOfFailure();
  // `then` runs once what had come from the members by now has been read.
  void whenRead(std::function<void()> then, int turns = kTurnsToRead);
  void abandon();  // its owner goes: if the lifecycle has failed, this generation is over now
  void close();    // over, at once; fails the lifecycle if it is not over yet
  int linkCount() const { return links_.count(); }
  const Traffic& traffic() const { return *traffic_; }  // any thread

  // Any thread. True: over, every operation completed.
  bool waitDrained(Deadline deadline);

 private:
  enum class State { kLinking, kBarrier, kUp, kOver };
  struct ControlLane;
  struct Peer {
    std::unique_ptr<ControlLane> control;
    bool barrier_seen = false;
    bool gave_up = false;           // this attempt to form the generation: it will never be up
    bool left = false;              // said goodbye on the control lane
    bool collectives_left = false;  // said goodbye on the collective lane, after all its data
    bool begins_another = false;    // its goodbye is not for good
  };

  // What the others are told on every lane that stands, once, when it is over.
  struct LastWords {
    FrameHeader frame;
    std::string payload;
    FailurePtr announced;  // to the monitor too; null: a goodbye
    bool said = false;
  };

  int rank() const { return setup_.lifecycle->identity().rank; }
  int size() const { return setup_.lifecycle->identity().size; }
  Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }

  void laneArrived(int rank, Lane lane, UniqueFd fd);
  void lacks(const std::string& why);
  void allLanesStand();
  void startMonitor();
  void maybeUp();
  void passIfPassedBy(const FrameHeader& last_words);
  void becomeUp();
  void breakAttempt(const Failure& failure, bool superseded);

  void onControlText(int rank, const FrameHeader& header, const std::string& payload);
  void onFailedFrame(int rank, const FrameHeader& header, const std::string& payload);
  void onGoodbye(int rank, const FrameHeader& goodbye);
  // From either lane.
  void onLaneEnded(int rank, Lane lane);
  void onVerdict(int rank, FailureKind kind, const std::string& how);
  Failure lossOf(int rank, FailureKind kind, const std::string& how) const;
  void failPeer(int rank, FailureKind kind, const std::string& how);
  void onCollectivesLeft(int rank, const FrameHeader& goodbye);
  void noteFarewell(int rank, const FrameHeader& goodbye);
  void failLeaver(int rank, const std::string& how);

  void onLifecycleFailed(const FailurePtr& failure);
  void becomeOver(Duration rest_after);
  void sayLastWords();
  void leaveWhenIdle();
  void sayGoodbye();
  void haveLeft();
  bool everythingSent() const;
  bool idle() const;
  // A pending send, recv, or collective of a callback waits for this peer.
  bool needsMessagesOf(int rank) const;

  HostGenerationSetup setup_;
  FormingCallbacks forming_;
  State state_ = State::kLinking;
  std::unique_ptr<Mesh> mesh_;
  GenerationLinks links_;
  const std::shared_ptr<Traffic> traffic_ = std::make_shared<Traffic>();  // of the links
  std::vector<Peer> peers_;
  std::unique_ptr<ScheduleRunner> runner_;
  std::unique_ptr<Messages> messages_;
  std::unique_ptr<NestedCollectives> nested_;  // over messages_
  std::unique_ptr<PeerMonitor::Watch> watch_;
  std::unique_ptr<LinkJudge> judge_;  // until it is over
  std::optional<Failure> lost_while_forming_;
  Lifecycle::Subscription subscription_ = 0;
  Farewell farewell_ = Farewell::kForGood;
  std::vector<std::function<void(bool left)>> leaving_;  // who waits for the goodbye
  Communicator::OnPeerLeft told_of_leavers_;
  LastWords last_words_;
  // Of the failure that this one was told of, by a member's last words or the monitor.
  const std::shared_ptr<std::atomic<bool>> others_are_told_ =
      std::make_shared<std::atomic<bool>>(false);

  Mutex drained_mutex_;
  CondVar drained_changed_;
  bool drained_ GUARDED_BY(drained_mutex_) = false;
};

}  // namespace torchft_ext

// All that the peer monitor decides: joins the detector, which watches this process's own
// connections, with the notices by which members tell each other what their connections told them.
// No sockets, no clock, no thread of its own: whole worlds of instances run in the tests, in
// simulated time.
//
// Per generation (a watch here):
//   unknown  notices about it wait in the NoticeCache
//   live     fails with the first news of any source, or is left when its watch is removed
//   over     its outcome has been sent to each member to which a connection stands, and its
//              OutcomeBroadcast sees to it that the neighbours know, for a while at most. Then, and
//              when the watch has been removed, it is retired: from now on only the NoticeCache
//              knows its outcome
// A failure is sent on by every member that had not known of one, to whom it has it from too, who
// learns by it that it arrived: one notice each way on each connection, over at most log2(n) + 1
// hops. A member that leaves is spread in the same way, but not back; it is no failure. Whenever a
// connection comes up, both ends ask each other about the generations they share, so a connection
// that is late misses nothing.
//
// A member that hears nothing of a neighbour seeks it: it asks those to whom it has connections,
// they ask that process over theirs, and its answer comes back the same way. A neighbour that is
// one step on the overlay away has a neighbour in common with it, so one who knows both is asked,
// where there are three.
//
// Why no survivor stays blocked. Let something be broken in a generation: a member dead or frozen,
// or a connection of the overlay cut. The overlay of the members present is connected, so from
// every survivor a path leads to a broken member or connection. Take the first broken one on it:
// the member before it is its neighbour and alive, so its own connection ends, falls silent or
// never comes up, each of which the detector ends in a verdict; and whatever lies between that
// member and the survivor is whole, so the notice comes along. That holds for any number and order
// of breaks, since every one of them is a cause, not only an obstacle: a notice lost with the
// process or connection that carried it is replaced by the news of that very loss. A survivor that
// has moved on to another generation has been told, and its OutcomeBroadcast tells its neighbours;
// one that left has said so, and the others close their ranks around it, before the generation ends
// for them (Detector) and after (OutcomeBroadcast): so members that know of different leavers still
// come to the same ring. The last resort of a member whose neighbour is alive but has no connection
// to it is the detector's: kLooksForAConnection.
// The exception: with heartbeats off a frozen member is not noticed, and passes nothing on.
//
// Trust: a notice comes over an admitted connection, hence from a fellow member of some generation,
// and is believed. Its ranks are checked; a failure that names this process is put into its own
// words.
//
// Owner: MonitorCore. Threads: the monitor's loop only. Orders are given from inside its methods;
// they must not call back. After the last retire() nothing is kept but the cache and tombstones.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "liveness/detector.h"
#include "liveness/notice.h"
#include "liveness/notice_cache.h"
#include "liveness/outcome_broadcast.h"

namespace torchft_ext {

class PropagationOrders : public LivenessOrders {
 public:
  virtual void fail(WatchId watch, Failure failure) = 0;  // at most once for a watch
  // Over the standing main connection to that process. False: there is none.
  virtual bool send(const Incarnation& to, const Notice& notice) = 0;
  virtual void retire(WatchId watch) = 0;  // the last order about it
};

struct PropagationCounts {
  DetectorCounts detector;
  uint64_t notices_sent = 0;  // failures and leavers, not questions
  uint64_t notices_heard = 0;
};

class FailurePropagation : private DetectorOrders, private BroadcastOrders {
 public:
  using Time = Clock::time_point;

  struct Identity {
    Incarnation incarnation;
    std::string host;
    int64_t pid = -1;
  };

  FailurePropagation(PropagationOrders& orders, Duration heartbeat_limit, Identity self);

  void addWatch(Time now, WatchId id, const Nonce& generation, int self_rank,
                const std::vector<WatchedPeer>& peers);
  // unless it has failed: this process leaves the generation
  void removeWatch(Time now, WatchId id);
  void peerLeft(Time now, WatchId id, int rank);
  // The generation failed here for a reason of its own; the watch's owner knows.
  void announce(Time now, WatchId id, Failure failure);

  void connectionUp(Time now, const Incarnation& peer, LivenessKind kind);
  void heard(Time now, const Incarnation& peer) { detector_.heard(now, peer); }
  void noticed(Time now, const Incarnation& from, const Notice& notice);
  void connectionEnded(Time now, const Incarnation& peer, LivenessKind kind, LivenessEnd end);
  void probed(Time now, const Incarnation& peer, LivenessKind kind, Liveness answer,
              uint64_t number);

  void tick(Time now);
  std::optional<Time> nextDue(Time now);  // as Detector's

  PropagationCounts counts() const;
  size_t generations() const { return generations_.size(); }

 private:
  struct Generation {
    Nonce nonce;
    int self_rank = -1;
    int rank_bound = 0;  // above every member's rank
    bool removed = false;
    std::optional<OutcomeBroadcast> broadcast;  // set: over
    std::vector<Notice> leavers;
    std::set<Incarnation> asked;  // over the connection that stands
  };

  // Orders of the detector.
  void fail(WatchId watch, Failure failure) override;
  void left(WatchId watch, const Incarnation& peer, int rank) override;
  void wantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void unwantConnection(WatchId watch, const Incarnation& peer, LivenessKind kind) override;
  void probe(const Incarnation& peer, LivenessKind kind, const ProbeOrder& order) override;
  void accuse(const Incarnation& peer, const std::string& why) override;
  void warn(const std::string& text) override;
  std::string processState(const std::string& host, int64_t pid) override;
  void askOthers(const Incarnation& peer) override;

  // Orders of the outcome broadcasts.
  bool send(const Incarnation& to, const Notice& notice) override;
  void keepConnection(WatchId watch, const Incarnation& peer) override;
  void dropConnection(WatchId watch, const Incarnation& peer) override;

  void end(WatchId id, Generation& generation, Notice outcome);
  Notice failureOf(WatchId id, const Generation& generation, const Failure& failure) const;
  void hear(const Notice& notice);
  void hearIn(WatchId id, Generation& generation, const Notice& notice);
  void hearAfter(OutcomeBroadcast& broadcast, const Notice& notice);
  void answer(const Incarnation& from, const Nonce& nonce);
  bool isSource(const Generation& generation, const Incarnation& member) const;
  void ask(WatchId id, Generation& generation, const Incarnation& peer);
  void seek(const Incarnation& from, const Notice& question);
  void seen(const Incarnation& from, const Notice& answer);
  Failure inOwnWords(const Generation& generation, Failure failure) const;
  // then retires those that are done
  void forEachBroadcast(const std::function<void(OutcomeBroadcast&)>& call);
  void retireFinished();

  PropagationOrders& orders_;
  const Identity self_;
  Detector detector_;
  NoticeCache cache_;
  std::map<WatchId, Generation> generations_;
  std::map<Incarnation, Nonce> sought_;  // by this process: the last question
  struct ForwardedQuery {                // a question of another's, put to whom it seeks
    Incarnation asker;
    Incarnation sought;
    Nonce question;
  };
  // at most kMostForwardedQueries, the oldest are dropped
  std::deque<ForwardedQuery> forwarded_queries_;
  uint64_t notices_sent_ = 0;
  uint64_t notices_heard_ = 0;
  // Of the call under way.
  Time now_;
  Incarnation source_;  // who sent the notice that is being handled: it knows
  Nonce source_generation_;
  std::optional<WatchId> announced_;
};

}  // namespace torchft_ext

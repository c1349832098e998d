// An elastic job as a program on torch sees it: one member, and the groups whose generations follow
// the job's views.
//
// Owner: the caller. Threads: any; one recover() at a time. A view that is over fails its groups'
// generations, wherever the user's code is. Destroyed, it leaves without a word.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"
#include "c10d/group/ft_backend.h"
#include "elastic/admission.h"
#include "elastic/elastic_member.h"
#include "elastic/job_inquiry.h"
#include "elastic/standstill.h"

namespace torchft_ext {

struct ElasticJobOptions {
  std::string address;  // of the job's store: "host:port/name"; empty: the job has none
  // "host:port" of members by which the job is found; the store is then its witness alone. Empty:
  // it is found in the store.
  std::vector<std::string> members;
  std::string key;     // that who comes by `members` has to know
  std::string listen;  // "host:port", or "port"; empty: any port
  int size = 1;
  int min_size = 1;
  int max_size = 65536;
  bool store_rule = false;
  std::chrono::milliseconds limit{5000};  // a member that is silent for so long is left out
  // So long no process of a host is taken in whose link to a member's host is cut.
  std::chrono::milliseconds backoff = Admission::kBackoff;
  FtOptions network;  // interface and ports
};

class ElasticJob {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using BackendPtr = c10::intrusive_ptr<FtBackend>;

  // ValueError for bad options; else ElasticError. Blocks up to the timeout; calls the wait hook.
  // leaving: once it is true the call ends, by ElasticError (kLeftOut). Null: never.
  static std::shared_ptr<ElasticJob> join(const ElasticJobOptions& options, Milliseconds timeout,
                                          std::shared_ptr<std::atomic<bool>> leaving = nullptr);
  // How that job is, of a process that takes no part in it: `address`, or `members` and `key`, of
  // the options. ValueError for bad ones; nothing else. Blocks up to the timeout; calls the wait
  // hook.
  static JobState inquire(const ElasticJobOptions& options, Milliseconds timeout);
  ~ElasticJob();
  ElasticJob(const ElasticJob&) = delete;
  ElasticJob& operator=(const ElasticJob&) = delete;

  // From the next view on a group's generations follow the views: that of each of its backends. The
  // members give it the same name, and manage the same groups: recover() compares them. Blocks
  // while the network is looked up. RuntimeError for a name that is taken, and where no port can be
  // had: then none is managed.
  void manage(const std::string& name, const std::vector<BackendPtr>& backends);

  // Prepares a group whose generations its caller begins in the views, as manage() prepares each of
  // its own: its failures advise recover(), and interface, ports and heartbeat that it has not
  // chosen itself are the job's. So a frozen member holds up a collective no longer than the job's
  // limit.
  void adopt(const BackendPtr& backend) const;

  using Phases = std::vector<std::pair<std::string, Duration>>;
  struct Formed {
    View view;
    // Where a generation has failed: "detect" (the lost process's silence, where that is known) and
    // "release" (from the failure to this call). Then "agree", "connect".
    Phases phases;
  };
  // Waits for a view newer than the one that was formed last, and forms all groups in it; a view
  // that does not form is followed by another. patience: members whose users have not come to a
  // view for so long are left out of the next one, where the others may go on without them
  // (nextView()). Blocks up to the timeout;
  // calls the wait hook. Raises ElasticError, and where members were missing until the deadline,
  // that generation's failure. ElasticError (kNoProgress) where views of the same members come to
  // nothing again and again, for causes that do not pass: Standstill has the rule. The next view is
  // then asked for after a pause, which ends early where this member leaves or aborts.
  // without_quorum: this member goes on alone first, in a lineage of its own.
  Formed recover(Milliseconds timeout, std::optional<Milliseconds> patience = std::nullopt,
                 bool without_quorum = false);
  // One line for the view that was formed last: who is in it, who decided, who is not in it any
  // more and why, and how long each part took; processes that ask how the job is hear the latter.
  // Of whoever called recover().
  void logView(const Phases& phases) const;
  // A line of level INFO, which names the job.
  void logLine(const std::string& line) const;
  // The view that was formed last came to nothing after all: something of it was formed elsewhere,
  // and that failed. how: the cause in one clause; description: in full.
  void cameToNothing(FailureKind kind, const std::string& how, const std::string& description);
  // In the view that was formed last. std::invalid_argument: the note, or a part of the digest, is
  // too long.
  Answer agree(Vote vote, Milliseconds timeout);
  // Fails the generations of all managed groups, and ends the view, in whose store members may wait
  // for this one.
  void abort(const std::string& why);
  // As that of the member.
  void setShard(std::optional<uint32_t> shard) { member_->setShard(shard); }
  // Ranks of the view that was formed last. std::invalid_argument: one is none of them.
  void setSoleHolders(const std::vector<int>& ranks, Milliseconds patience);
  // As those of the member; a recover() that pauses goes on to hear of it, and one that waits for
  // this process's first view ends by kLeftOut. From a signal's handler too.
  void setLeaving();
  // The job has ended well: as that of the member. Calls the wait hook.
  bool recordEnd(Deadline deadline);
  // Shuts the managed groups down, for a quarter of the time at most, and then says goodbye as the
  // member does. So members that wait for this one in an operation learn that it has left;
  // otherwise it would wait here for members that wait for it there. The groups cannot be used any
  // more. Calls the wait hook. In a forked child: true, and nothing is done.
  bool leave(Deadline deadline);

  uint64_t formedView() const;  // its number; 0: none yet
  // Has an operation of the view that was formed last waited in vain, for its whole timeout?
  bool hasTimedOut() const;
  c10::intrusive_ptr<c10d::Store> storeOf(uint64_t view) const;
  ElasticMember& member() { return *member_; }
  // Where the member listens.
  const std::string& interfaceName() const { return interface_name_; }  // empty: not known

 private:
  struct Managed {
    std::string name;  // that of the group; from its second backend on with "/1" and so on
    BackendPtr backend;
    int64_t generation = 0;  // that it has formed in the view that was formed last
  };
  ElasticJob() = default;
  const uint64_t forks_ = forkCount();  // a forked child has no part in the job
  void onStopped(uint64_t view, const std::string& why);
  FailurePtr formAll(const View& view, int rank, Deadline deadline);
  Formed recoverBy(Deadline deadline, std::optional<Duration> patience, bool alone);
  std::vector<Managed> managed() const;
  void suspectCulprits();
  Phases phasesOfLoss() const;
  void noteFormed(uint64_t view);
  void judgeLastView();
  std::optional<Setback> setbackOfLastView(const View& view) const;
  // Records the outcome of a view, which stood for this long.
  void judge(const View& view, std::optional<Setback> setback, Duration stood);
  void requireProgress(Deadline deadline);
  void pauseBefore(Deadline deadline);
  // It has been told to leave, and no view that it has formed counts on it.
  bool isEarlyLeaver() const;
  View awaitView(uint64_t newer_than, Deadline deadline, const std::set<MemberPair>& unreachable,
                 const std::set<MemberId>& absent);
  [[noreturn]] static void throwLeftEarly();
  void requireFree(const std::string& name, size_t backends) const REQUIRES(mutex_);

  std::shared_ptr<ElasticMember> member_;
  std::string name_;            // constant after join(); for messages
  std::string interface_name_;  // likewise
  FtOptions network_;           // likewise: of groups that have not chosen themselves
  // Of all groups that follow the job, and those beside them.
  const std::shared_ptr<SuccessCount> successes_ = std::make_shared<SuccessCount>(0);
  mutable Mutex mutex_;
  std::vector<Managed> managed_ GUARDED_BY(mutex_);
  View formed_ GUARDED_BY(mutex_);           // number 0: none yet
  std::string left_out_ GUARDED_BY(mutex_);  // of formed_, for its line in the log
  uint64_t tried_ GUARDED_BY(mutex_) = 0;    // the newest view that was formed, or could not be
  uint64_t forming_ GUARDED_BY(mutex_) = 0;  // 0: none
  uint64_t judged_ GUARDED_BY(mutex_) = 0;   // the newest view that standstill_ has heard of
  Clock::time_point formed_at_ GUARDED_BY(mutex_);             // formed_
  uint64_t succeeded_before_ GUARDED_BY(mutex_) = 0;           // successes_ when tried_ was
  std::optional<Setback> came_to_nothing_ GUARDED_BY(mutex_);  // why formed_ did
  Standstill standstill_ GUARDED_BY(mutex_);
  CondVar woken_;
  uint64_t aborts_ GUARDED_BY(mutex_) = 0;
  bool leaves_ GUARDED_BY(mutex_) = false;
};

}  // namespace torchft_ext

// What the threads of a member's user see of it, and how they wait for it: written on the member's
// loop, read anywhere, under one mutex.
//
// Owner: an ElasticMember. Threads: any, but for what is marked "loop". The calls that wait end by
// their deadline, once `cancelled` says so, or with ElasticError, whose text names who is missing
// and what to do. After leave() they throw. It never blocks the loop.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "elastic/cancellable_wait.h"
#include "elastic/elastic_core.h"
#include "elastic/job_report.h"
#include "elastic/job_store.h"
#include "elastic/progress.h"

namespace torchft_ext {

// For messages: "its process ended".
const char* wordFor(Loss loss);

class MemberStatus {
 public:
  explicit MemberStatus(std::string job) : job_(std::move(job)) {}  // its name, for messages

  void setSelf(const Member& self);
  void setRules(const ElasticRules& rules);
  void setLeaving();
  // False: it had left already. Every wait ends.
  bool leave();

  // Loop. In this order after an event: begin() where the core has a new view, then follow().
  void begin(const ElasticCore& core);
  // hopeless: those that are missing for a quorum are so for good.
  void follow(const ElasticCore& core, const ElasticEffects& effects, bool hopeless);
  void setOver(uint64_t view);  // this view, and those before
  // Of a newcomer: nobody of the job lives, of which it knew these.
  void setContactsGone(const std::vector<Member>& members);
  void setJobOver(const JobEnd& end);
  void setHow(const std::map<MemberId, std::string>& lost);  // as a generation has told it
  void setStoreTrouble(std::string trouble);
  void noteSteps(uint64_t committed);  // any thread: by the program's own count
  void notePhases(uint64_t view,       // any thread
                  const std::vector<std::pair<std::string, Duration>>& phases);

  Member self() const;
  View view() const;
  ElasticRules rules() const;
  std::vector<std::string> waiting() const;
  std::string nameOf(const MemberId& id) const;  // "host, pid 7 (its process ended)"
  std::vector<MemberId> leftOutSince(const View& view) const;
  bool isOver(uint64_t view) const;
  // Of the view: who is in it, and what is known here of each; the last changes, and the steps.
  void describe(JobReport& report) const;
  bool isLeaving() const;
  // std::invalid_argument: too long for an agreement of the newest view.
  void checkNote(const std::string& note) const;

  // without_quorum: that there is none any more is no reason to give up.
  View awaitView(uint64_t newer_than, Deadline deadline, const Cancelled& cancelled,
                 bool without_quorum = false);

  // An agreement of this member: which one, and whether it is new. One that ran out of time is not
  // new, but taken up.
  struct Agreement {
    uint64_t view = 0;
    uint64_t index = 0;
    bool fresh = false;
  };
  // Throws ElasticError at once where another thread is in one.
  Agreement beginAgreement(uint64_t view);
  // After a tenth of the time a line in the log says whose word is missing.
  Answer awaitAnswer(const Agreement& agreement, Deadline deadline, const Cancelled& cancelled);

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // view, index
  std::string nameOfLocked(const MemberId& id) const REQUIRES(mutex_);
  std::string nameOfGone(const MemberId& id) const REQUIRES(mutex_);
  std::string troubleOf(const MemberId& id) const REQUIRES(mutex_);
  void noteChange() REQUIRES(mutex_);
  std::string namesOf(const std::vector<MemberId>& ids) const REQUIRES(mutex_);
  [[noreturn]] void throwNoView() const REQUIRES(mutex_);
  [[noreturn]] void throwNoQuorum() const REQUIRES(mutex_);
  [[noreturn]] void throwContactsGone() const REQUIRES(mutex_);
  std::string adviceToNewcomer() const REQUIRES(mutex_);
  bool lacksWitness() const REQUIRES(mutex_);
  [[noreturn]] void throwWithoutWitness() const REQUIRES(mutex_);
  const char* adviceWithoutQuorum() const REQUIRES(mutex_);
  std::string storeTrouble() const REQUIRES(mutex_);
  bool isSettled(const Key& wanted) const REQUIRES(mutex_);
  void waitForAnswer(const Key& wanted, Deadline deadline, const Cancelled& cancelled)
      REQUIRES(mutex_);
  std::string awaitedAfter(Duration early, const Key& wanted, const Cancelled& cancelled);
  Answer takeAnswer(const Key& key) REQUIRES(mutex_);
  [[noreturn]] void throwNoAnswer(uint64_t index) const REQUIRES(mutex_);

  const std::string job_;
  mutable Mutex mutex_;
  CondVar changed_;
  Member self_ GUARDED_BY(mutex_);
  ElasticRules rules_ GUARDED_BY(mutex_);
  // Of the core.
  View view_ GUARDED_BY(mutex_);
  View view_before_ GUARDED_BY(mutex_);
  std::map<MemberId, Loss> lost_ GUARDED_BY(mutex_);
  std::map<MemberId, std::string> how_ GUARDED_BY(mutex_);   // of some of them, for messages
  std::map<MemberId, Loss> lost_before_ GUARDED_BY(mutex_);  // of the view before, not in this one
  std::vector<MemberId> unheard_ GUARDED_BY(mutex_);         // whose word an agreement awaits
  std::vector<MemberId> waiting_ids_ GUARDED_BY(mutex_);     // newcomers
  std::vector<std::string> waiting_ GUARDED_BY(mutex_);      // the same, by name
  std::vector<MemberId> missing_ GUARDED_BY(mutex_);         // for a quorum; empty: nobody known
  bool hopeless_ GUARDED_BY(mutex_) = false;                 // so many are dead that there is none
  std::map<MemberId, std::string> names_ GUARDED_BY(mutex_);
  // The ends.
  uint64_t over_ GUARDED_BY(mutex_) = 0;
  bool left_out_ GUARDED_BY(mutex_) = false;
  bool leaving_ GUARDED_BY(mutex_) = false;  // by its own word
  bool left_ GUARDED_BY(mutex_) = false;
  std::vector<MemberId> gone_contacts_ GUARDED_BY(mutex_);  // empty: somebody of the job may live
  std::optional<JobEnd> job_end_ GUARDED_BY(mutex_);        // of a newcomer that found it
  std::string store_trouble_ GUARDED_BY(mutex_);
  // For who asks how the job is.
  struct Change {
    ReportedChange told;
    Clock::time_point at;
  };
  std::deque<Change> changes_ GUARDED_BY(mutex_);                           // the newest first
  std::map<MemberId, Clock::time_point> present_since_ GUARDED_BY(mutex_);  // members of view_
  Progress progress_ GUARDED_BY(mutex_);
  // Agreements.
  std::map<Key, Answer> answers_ GUARDED_BY(mutex_);
  Key asked_ GUARDED_BY(mutex_){0, 0};
  bool agreeing_ GUARDED_BY(mutex_) = false;       // its answer has not been taken yet
  bool awaits_answer_ GUARDED_BY(mutex_) = false;  // a thread does
};

}  // namespace torchft_ext

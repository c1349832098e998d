// One member of an elastic job: the protocol's core with its clock, its connections and its store.
//
// Owner: whoever joined; the destructor leaves without a word and ends the threads. Threads: every
// public method from any, at any time; the protocol runs on the member's own loop ("ft-elastic"),
// so it votes, promises and answers while the user's code is busy. Blocking calls end by their
// deadline, or when `cancelled` (called every few milliseconds on the waiting thread) says so or
// throws. No lock is held while anything blocks or calls out.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/fork.h"
#include "elastic/cancellable_wait.h"
#include "elastic/elastic_message.h"
#include "elastic/elastic_options.h"
#include "elastic/view_store.h"
#include "torchft_ext/elastic_error.h"

namespace torchft_ext {

struct MemberDriver;

class ElasticMember {
 public:
  // Comes to the job: founds it with others, or asks for a place in it. Returns at once where the
  // store answers; awaitView() waits for the place. Throws ElasticError.
  static std::shared_ptr<ElasticMember> join(ElasticOptions options, Deadline deadline,
                                             const Cancelled& cancelled = {});
  ~ElasticMember();
  ElasticMember(const ElasticMember&) = delete;
  ElasticMember& operator=(const ElasticMember&) = delete;

  MemberId id() const;
  View view() const;                             // the newest one known; number 0: none yet
  std::vector<std::string> waiting() const;      // newcomers: a hint
  ElasticRules rules() const;                    // of the founding
  std::string nameOf(const MemberId& id) const;  // "host, pid 7 (its process ended)"
  // Of the view before this one, which is the newest known, who is not in it any more.
  std::vector<MemberId> leftOutSince(const View& view) const;

  // Waits for a view newer than this, with this member in it; asks for one. leave_out: members of
  // the newest view to be left out unless they wait too, where those that wait may go on without
  // them (nextView()); unreachable: pairs of its members that
  // could not connect, of which one is left out. Throws ElasticError.
  View awaitView(uint64_t newer_than, Deadline deadline, const Cancelled& cancelled = {},
                 const std::set<MemberPair>& unreachable = {},
                 const std::set<MemberId>& leave_out = {});
  // An operator's word, where no quorum is left: this member goes on alone from its newest view, in
  // a lineage of its own. Whoever lives of the old one counts it as gone, and can only join anew.
  // Throws ElasticError: it is in no view, or left out.
  View goOnAlone(Deadline deadline, const Cancelled& cancelled = {});
  // Asks for a view newer than this, and waits for nothing. A moment later, so that members hear
  // first why the view's generations have failed.
  void endView(uint64_t view);
  // What a failed generation told of members: they are lost until they say something. Each with how
  // it was lost, for messages.
  void suspect(const std::map<MemberId, std::string>& lost);
  // The user awaits a view, or forms one: who leaves out the absent keeps it. awaitView() says so.
  void setReady(bool ready);
  // The shard of a sharded state that the user holds; nothing: none.
  void setShard(std::optional<uint32_t> shard);
  // In the newest view: without one of these the others cannot go on, so one that freezes is not
  // lost before the patience has passed. In later views that holds of all until the next call.
  void setSoleHolders(const std::set<MemberId>& ids, Duration patience);
  // While a view's groups are formed: its members are asked whether they live, and the loss of one
  // is told as the view's end.
  void watchForming(bool forming);
  bool isOver(uint64_t view) const;
  // So many steps have been committed, by the program's count: for those who ask how the job is.
  void noteSteps(uint64_t committed);
  // For them, too: the groups stand in that view, after so long in each phase.
  void notePhases(uint64_t view, const std::vector<std::pair<std::string, Duration>>& phases);
  // This member's next agreement of that view, which it has formed. std::invalid_argument: the note
  // is longer than 1 MiB divided by the number of members, or a part of the digest than 16 bytes. A
  // call that ran out of time is taken up by the next one: it is the same agreement. One thread at
  // a time; another one gets an ElasticError at once, as for everything else that prevents an
  // answer.
  Answer agree(uint64_t view, Vote vote, Deadline deadline, const Cancelled& cancelled = {});
  // This member goes: its next vote says so, and awaitView() gives it no view any more. It throws
  // kLeftOut once there is one without it, though others may have put it into one before they knew.
  void setLeaving();
  // The members have agreed that the job has ended well: records it in the job's store, for
  // processes that come later. Every member may call it. False: not recorded, since there is no
  // store, it does not answer by the deadline, or serves another job. Does not throw for that.
  // Those that come to this process's address are told so too, until it leaves.
  bool recordEnd(Deadline deadline, const Cancelled& cancelled = {});
  // Says goodbye, and answers the others until they go on without this member or go too: so one
  // that still waits for an answer gets it; then ends this member's threads. False: it was needed
  // still at the deadline. Every other call raises from now on.
  bool leave(Deadline deadline);  // in a forked child: true, and nothing is done

  // Of that view's store. Throws StoreError: the view is over, the store's host is lost, or the
  // deadline has passed.
  StoreAnswer callStore(StoreCall call, Deadline deadline, const Cancelled& cancelled = {});

 private:
  void requireOwnProcess() const;
  void want(uint64_t newer_than, const std::set<MemberPair>& unreachable,
            const std::set<MemberId>& leave_out);
  explicit ElasticMember(std::shared_ptr<MemberDriver> driver) : driver_(std::move(driver)) {}
  const uint64_t forks_ = forkCount();  // a forked child has none of the threads
  const std::shared_ptr<MemberDriver> driver_;
};

}  // namespace torchft_ext

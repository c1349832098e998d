// Who has come to an attempt, and whose end ends it: judges what the store and the member prober
// show. It knows no store, no clock and no socket, so tests play any interleaving.
//
// Rank 0 watches everyone who has come, the others watch rank 0. Until their rank has come, the
// members of the last generation are watched too, if the new one has room for all of them beside
// those who are new: they are presumed to come. Rank 0's place in the store is where all look:
// when its attempt ends, for whatever reason, it says there why, and whoever waits for it ends too.
// A prefix can be tried again at once, so what is found may belong to another attempt:
//
// clang-format off
//   found                                       it ends this attempt if
//   a process is gone or cannot be reached      it was met: it answered during this attempt, or
//                                               was in the last generation, which was healthy
//                                               until now, or has written a record since that one
//   a process is frozen                         its record is here, or it was met
//   a failure record in place of a record that  always
//   was seen here, or addressed to this attempt
//   a failure record, no record seen before     by a member of the last, healthy generation,
//                                               unless it only ran out of time: it was faster
//                                               than we are
// clang-format on
// but never if this group has been told before: of that process's end, or of that attempt's (our
// own earlier ones included). So every end is told once, and the next attempt is not harmed by it.
// What does not end the attempt is left over from another one: it counts as "not there yet", and
// its member is awaited until the deadline, then named.
//
// A group made beside others (new_group) has had no generation. Its members were in the default
// group's, which takes the place of the last one for ends of processes. It does not for failure
// records never seen: they may be of an earlier group with this name.
//
// Interleavings that this settles (each is a test):
// clang-format off
//   rank 0 tries again first       the others, not told yet, meet its fresh record, go on with it
//   another tries again first      rank 0 sees its fresh record and goes on; or it saw the failure
//                                  record and fails: then the new attempt knows the origin, its
//                                  own, and waits
//   a new process at the victim's  its record replaces the dead one's; until then the dead one's
//   rank                           is left over, since its end was told
//   a member comes after the end   it waits for the next attempt, unless it comes from the same
//                                  generation
//   a prefix with old records      their processes were never met: they are left over
// clang-format on
//
// Owner: a Rendezvous. Threads: that of its configure() only, but hasUpdates().
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "membership/member_prober.h"

namespace torchft_ext {

bool isLoss(FailureKind kind);  // of a member

// What a group remembers from one attempt to the next.
struct AttemptMemory {
  std::vector<MemberRecord> members;  // of the last generation, by rank
  bool healthy = false;               // all of them lived when this attempt began
  bool elsewhere = false;      // that was another group's generation, this group has had none
  std::set<Incarnation> told;  // processes of whose end the group has been told
  std::set<Token> settled;     // attempts whose end it has been told of, its own included

  // A failure of the last generation.
  void noteFailure(const Failure& failure);
};

class AttemptTracker {
 public:
  AttemptTracker(int rank, int size, const MemberRecord& self, AttemptMemory memory,
                 std::unique_ptr<MemberProber> prober);

  // What stands under a rank's key. Malformed bytes are nobody's.
  std::optional<Ending> judgeRecord(int rank, const std::string& bytes);
  // What the member prober has seen since.
  std::optional<Ending> judgeUpdates();
  bool hasUpdates() const { return prober_ && prober_->hasUpdates(); }

  // Everyone's records, once rank 0 has answered.
  void noteRoster(const std::vector<MemberRecord>& members) { roster_ = members; }
  // The group has had no generation: nobody here need have met the others.
  bool isFirstGeneration() const { return memory_.members.empty() || memory_.elsewhere; }
  // Processes whose records do not count.
  const std::set<Incarnation>& leftOver() const { return left_over_; }
  // How this attempt's failure is told: as the ending that was judged, if it was one.
  Ending endingOf(const Failure& failure) const;
  // The attempt is over: with this ending, or with a generation of these members. Ends the member
  // prober.
  AttemptMemory failed(const Ending& ending);
  AttemptMemory formed(std::vector<MemberRecord> members);

 private:
  struct Whom {
    int rank = -1;  // in this attempt; -1: not known
    const MemberRecord* record = nullptr;
    bool came = false;
  };

  std::optional<Ending> judgeFailureRecord(int rank, const FailureRecord& failure_record);
  std::optional<Ending> judgeLiveness(const MemberProber::Report& report);
  bool ranksAreKept() const;
  bool inLastGeneration(const Incarnation& incarnation) const;
  bool cameSince(const Whom& whom) const;
  bool toldBefore(const Ending& ending) const;
  bool ownDoing(const Ending& ending) const;
  const MemberRecord* whoCaused(const Failure& failure) const;
  Whom find(const Incarnation& incarnation) const;
  std::vector<MemberRecord> presumed() const;
  bool isPresumed(const Incarnation& incarnation) const;
  void updateProber();

  const int rank_;
  const int size_;
  const MemberRecord self_;
  AttemptMemory memory_;
  std::unique_ptr<MemberProber> prober_;  // null: nobody is watched
  std::vector<MemberRecord> roster_;
  std::map<int, MemberRecord> here_;  // by rank
  std::set<Token> seen_;              // of all records that were here
  std::set<Incarnation> met_;         // answered
  std::set<Incarnation> left_over_;
  // of those whose process has ended: may yet count
  std::map<Incarnation, MemberProber::Report> gone_;
  std::optional<Ending> ending_;  // the one that was judged
};

}  // namespace torchft_ext

// How the members of an attempt find each other: the protocol over the store, and nothing else.
//
// Rank r writes P/r = its record (with a fresh token). Rank 0 awaits all records and writes
// P/go/<r's token> = {r's token, nonce, secret, all records}: keyed by token, so that neither a
// roster of an earlier attempt at P nor its late deletion can be met. While a member waits it looks
// at its own record: one of another incarnation there means a duplicate rank; one that has vanished
// (deleted late by an earlier attempt) is written again. Rank 0 does so too, and reissues under a
// new nonce when a record changed after it had been read (a member that tried again), until every
// connection is up.
//
// Meanwhile everyone looks out for the end of others. Rank 0 reads the records one by one as they
// come, each other member reads rank 0's; a member whose attempt ends puts a failure record in its
// record's place. Then it looks who has come to the store meanwhile of those who read it, and
// writes it again, addressed to them: they may never have seen the record. Who comes later than
// that begins another attempt; but for the first generation of a group, whose members come when
// they are started, it goes on looking for a while (see awaitReaders()). Whose failure record, or
// death, ends this attempt too is the AttemptTracker's to judge. Threads: the caller's, which
// blocks until the deadline at most. Cancelled by the predicate.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "membership/attempt_tracker.h"
#include "membership/missing_ranks.h"
#include "membership/own_record.h"

namespace torchft_ext {

// How a failure (kRendezvous) says that members have come for different things.
inline constexpr const char* kOtherPurpose = "expected the same on all members: ";

// One rank's part in an attempt at P. Not thread-safe: used by the thread that runs configure.
class Rendezvous {
 public:
  // prober: null: nobody is watched.
  Rendezvous(std::shared_ptr<StoreThread> store, std::string prefix, int rank, int size,
             MemberRecord self, Deadline deadline, Cancelled cancelled, AttemptMemory memory = {},
             std::unique_ptr<MemberProber> prober = nullptr);

  // As succeeded(), but a failure record stands until the slower ones have had time to read it: its
  // group may be gone at once (a creator that failed).
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // How long ends before the first generation are held up for those who come late. Ranks that a
  // launcher started together come within milliseconds of each other.
  static constexpr std::chrono::seconds kReadersComeWithin{2};

  // In place of enter(), once, by a member that cannot take part: has that told to those who wait
  // for it. Blocks until they have read it, for `readers_within` at most once the store has
  // answered, until the deadline in all.
  void publishFailedInit(const Failure& why, Duration readers_within = kReadersComeWithin);
  // Publishes the record and waits for the roster. Returns a Failure (kTimeout naming the missing
  // ranks as far as rank 0 can see them, kStoreLost, kRendezvous for a duplicate rank or a
  // malformed record, kAborted when cancelled; kPeerLost, and whatever a member withdrew with)
  // without group, generation, op: the caller fills those in.
  std::variant<Roster, Failure> enter();
  // While connections are being made: has the attempt been superseded? Rank 0: a member's record
  // changed, so a new roster was issued. Others: a newer `go` with our token is there. Failure: the
  // attempt has ended (a store that does not answer is no reason; one that has been lost for two
  // seconds is). nullopt: no change. Call it every few tens of milliseconds at most: each call is a
  // few store round trips, of a second at most in all.
  std::variant<std::monostate, Roster, Failure> refresh();
  // What the store did instead of answering the last refresh(). Empty: it answered.
  const std::string& storeTrouble() const { return store_trouble_; }
  // The attempt is over, with a generation of the last roster, or with this failure: then that is
  // told, in the background, to those who wait for this member. Once; ends the member prober.
  AttemptMemory formed();
  // After formed(): deletes what this rank wrote. Nobody needs it, since this rank has its
  // connections to all others. Blocks until that is done, for `within` at most: a store's server
  // may end with any member's process once that is through with the generation, and torch's client
  // logs what it loses.
  void leaveStore(Duration within);
  AttemptMemory publishFailure(const Failure& why);
  // After publishFailure(), by rank 0, of another's end before the first generation: those who come
  // after it could not tell it from an end of long ago. Has it told to them too. Blocks until all
  // have read it, until the time given or the deadline at most; elsewhere it returns at once. May
  // throw what `cancelled` throws.
  void awaitReaders(Deadline until, const Cancelled& cancelled);
  // After publishFailure(): a later attempt of this group has formed a generation. Each rank
  // deletes what it wrote, in the background: a later attempt at P by this process comes after
  // that. Not the record if another one has taken its place.
  void succeeded();

 private:
  using Outcome = std::variant<Roster, Failure>;
  using Refreshed = std::variant<std::monostate, Roster, Failure>;

  void removeRosters();
  std::optional<Failure> judgeUpdates();
  std::optional<Failure> judgeRecords(int first, const std::vector<std::string>& records);
  std::optional<Failure> scan();
  StoreThread::Acceptable present() const;
  StoreThread::Acceptable usable() const;
  bool interrupted(const StoreReply& reply);
  Cancelled updatesOrCancelled();
  Outcome lead();
  Outcome follow();
  Refreshed refreshLeader();
  Refreshed refreshFollower();
  StoreReply lookWhileConnecting(const std::vector<std::string>& awaited, Deadline within);
  StoreReply whileConnecting(const std::function<StoreReply()>& look);
  std::optional<Failure> lostForLong(const StoreReply& reply);
  std::optional<Failure> keepOwn(const std::string& found, Deadline within);
  bool mayBeMissed(const Ending& ending) const;
  std::vector<std::string> readersBut(int rank) const;
  Outcome issue(const std::vector<std::string>& records);
  Outcome accept(const std::string& go);
  Failure membersMissing();
  Failure leaderMissing();
  MissingRanks missing() const;
  Deadline lastLook() const;

  const std::shared_ptr<StoreThread> store_;
  std::optional<StoreLimit> limit_;  // while the attempt goes on
  const AttemptKeys keys_;
  const int rank_;
  const int size_;
  const Deadline deadline_;
  const Cancelled cancelled_;
  OwnRecord own_;
  AttemptTracker tracker_;
  Roster current_;
  std::vector<std::string> awaited_;  // the places of those who may come after the failure record
  int next_in_scan_ = 1;
  std::string store_trouble_;
  std::optional<Clock::time_point> lost_since_;  // the store, as refresh() saw it
  bool gave_up_ = false;                         // `cancelled` said so
  std::set<Token> issued_;                       // rank 0: for whom it wrote a roster
};

}  // namespace torchft_ext

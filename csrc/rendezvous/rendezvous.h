// How the members of an attempt find each other: the protocol over the store, and nothing else.
//
// Rank r writes P/r = its record (with a fresh token). Rank 0 awaits all records and writes
// P/go/<r's token> = {r's token, nonce, secret, all records}: keyed by token, so that neither a
// roster of an earlier attempt at P nor its late deletion can be met. While a member waits it looks
// at its own record: one of another incarnation there means a duplicate rank; one that has vanished
// (deleted late by an earlier attempt) is written again. Rank 0 does so too, and reissues under a
// new nonce when a record changed after it had been read (a member that tried again), until every
// link is up.
// Threads: the caller's, which blocks until the deadline at most. Cancelled by the predicate.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/identity.h"
#include "net/socket_address.h"
#include "rendezvous/store_thread.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {

// What a member tells the others about itself.
struct MemberRecord {
  Incarnation incarnation;
  Token token;
  std::string host;  // for error messages
  int64_t pid = -1;
  std::vector<SocketAddress> addresses;       // of its listener, tried in turn
  std::vector<SocketAddress> line_addresses;  // of its peer monitor; may be empty
};
std::string encodeRecord(const MemberRecord& record);
std::optional<MemberRecord> decodeRecord(std::string_view bytes);

// What everyone knows once an attempt has formed.
struct Roster {
  Nonce nonce;
  EpochSecret secret;
  std::vector<MemberRecord> members;  // by rank
};
std::string encodeGo(const Token& token, const Roster& roster);
struct Go {
  Token token;
  Roster roster;
};
std::optional<Go> decodeGo(std::string_view bytes);

// One rank's part in an attempt at P. Not thread-safe: used by the thread that runs configure.
class Rendezvous {
 public:
  Rendezvous(std::shared_ptr<StoreThread> store, std::string prefix, int rank, int size,
             MemberRecord self, Deadline deadline, Cancelled cancelled);

  ~Rendezvous();  // as succeeded(), success or not
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Publishes the record and waits for the roster. Returns a Failure (kTimeout naming the missing
  // ranks as far as rank 0 can see them, kStoreLost, kRendezvous for a duplicate rank or a
  // malformed record, kAborted when cancelled) without group, epoch, op: the caller fills those in.
  std::variant<Roster, Failure> enter();
  // While links are being made: has the attempt been superseded? Rank 0: a member's record changed,
  // so a new roster was issued. Others: a newer `go` with our token is there. nullopt: no change.
  // Call it every few tens of milliseconds at most: each call is one store round trip.
  std::variant<std::monostate, Roster, Failure> refresh();
  // The epoch is up. Each rank deletes what it wrote, in the background: a later attempt at P by
  // this process comes after that. Not the record if another process has taken its place.
  void succeeded();

 private:
  using Outcome = std::variant<Roster, Failure>;
  using Refreshed = std::variant<std::monostate, Roster, Failure>;

  std::optional<Failure> publish();
  std::optional<Failure> checkOwnRecord();
  std::optional<Failure> judgeOwnRecord(const std::string& bytes);
  Outcome lead();
  Outcome follow();
  Refreshed refreshLeader();
  Refreshed refreshFollower();
  Outcome issue(const std::vector<std::string>& records);
  Outcome accept(const std::string& go);
  Failure membersMissing();
  Failure leaderMissing();
  void findMissing(int first, int last, std::vector<int>& missing);
  Failure failed(const StoreReply& reply) const;
  Deadline lastLook() const;
  std::string key(int rank) const;
  std::string goKey(const Token& token) const;
  std::vector<std::string> keys(int first, int last) const;

  const std::shared_ptr<StoreThread> store_;
  const std::string prefix_;
  const int rank_;
  const int size_;
  const MemberRecord self_;
  const Deadline deadline_;
  const Cancelled cancelled_;
  Roster current_;
  bool published_ = false;
  std::set<Token> issued_;  // rank 0: for whom it wrote a roster
  bool vanished_ = false;   // our record was once gone
  bool usurped_ = false;    // our record is another's now
};

}  // namespace torchft_ext

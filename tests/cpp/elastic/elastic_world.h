// A whole job as one value: the real ElasticCore of each member, the messages between them, the
// store, and what has happened so far. The model checker and
// the random schedules take steps in it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cpp/elastic/elastic_world_history.h"
#include "cpp/elastic/elastic_world_links.h"
#include "cpp/elastic/elastic_world_members.h"
#include "cpp/elastic/elastic_world_store.h"
#include "elastic/elastic_core.h"

// gcc and clang say it in ways of their own.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define TFT_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define TFT_SANITIZED 1
#endif
#endif

namespace torchft_ext {

struct ElasticWorldOptions {
  int members = 3;    // of the first view
  int newcomers = 0;  // that ask for a place
  bool witness = false;
  bool store_rule = false;
  int min_size = 1;
  bool secrets = false;  // views have some, and seals
  // How often at most, in one history:
  int deaths = 0;
  int suspicions = 0;        // a living member is called frozen by one other
  int agreements = 1;        // of a member in one view
  int noes = 0;              // votes that are no
  bool digests = false;      // votes have digests; those of members i and i + 2 are of one shard
  int divergences = 0;       // a digest differs from those of the others
  int views = 3;             // no agreement begins in a later one
  int retries = 0;           // while messages are still on their way
  int wants = 0;             // somebody wants another view without a reason
  int witness_restarts = 0;  // empty
  int witness_losses = 0;    // for good
  int partings = 0;          // a member goes on alone, in a lineage of its own
  int leaves = 0;            // a member asks for a view without itself
  int breaks = 0;            // a connection breaks: what is on its way there is lost
  int recoveries = 0;        // a user awaits a view; all others are at work, or hang
  int exclusions = 0;        // the same, and it calls all others absent
  int holds = 0;             // a member holds a newcomer back, and no other one any more
  // Links that never carry anything.
  std::set<std::pair<int, int>> cut;
  bool heals = false;         // at any moment, once, all of them
  bool groups_stand = false;  // who loses a living member asks for no view because of that
  // The protocol without one of its parts, to see that it is missed.
  ElasticParts parts;
};

struct ElasticAction {
  enum class Kind : uint8_t {
    kDeliver,  // the first message from a to b
    kVote,     // a: ok if b is not 0; 2, 3: with another common part, or part of its shard
    kDie,      // a
    kDetect,   // a is told that b is gone
    kSuspect,  // a takes b for frozen
    kRetry,    // a
    kWant,     // a
    kWitness,  // the store answers a's request
    kReply,    // a reads the store's reply
    kRestart,  // the store
    kLoseWitness,
    kHeal,
    kLook,   // a sees which store is there
    kPart,   // a
    kLeave,  // a
    kBreak,  // the connection from a to b, and a sees that
    kEnd,    // the same, and b sees that
    kRecover,
    kExclude,
    kHold,  // a holds b back
  };
  Kind kind = Kind::kDeliver;
  int a = 0;
  int b = 0;
};

class ElasticWorld {
 public:
  explicit ElasticWorld(const ElasticWorldOptions& options);

  // All that can happen now.
  std::vector<ElasticAction> actions() const;
  // One of them, without listing them all: a delivery most of the time, faults rarely. Nothing:
  // none was found, though there may be some.
  std::optional<ElasticAction> draw(std::mt19937_64& random) const;
  void take(const ElasticAction& action);
  // Empty: all is well so far.
  const std::string& wrong() const { return history_.wrong(); }
  // Goes on without any fault, in a fair order, until nothing happens any more. Then what is not as
  // it should be; empty: nothing.
  std::string settle();
  // Is it sure to come to that?
  bool mustSettle() const;

  std::string fingerprint() const;
  static std::string describe(const ElasticAction& action);

  int size() const { return static_cast<int>(cores_.size()); }
  const ElasticCore& core(int i) const { return cores_[static_cast<size_t>(i)]; }
  bool dead(int i) const { return dead_[static_cast<size_t>(i)]; }
  bool isPending(int i) const { return pending_[static_cast<size_t>(i)]; }  // in an agreement
  // 0: in none yet.
  LineageNumber lineageOf(int i) const { return numberOf(core(i).view().lineage); }
  uint64_t newestView() const;  // of the first lineage
  const ElasticWorldOptions& options() const { return options_; }
  const ElasticWorldStore& store() const { return store_; }
  const ElasticWorldHistory& history() const { return history_; }
  // What members had accepted before they went on alone: it may have been decided.
  const std::vector<View>& acceptedByParted() const { return accepted_by_parted_; }

 private:
  struct StoreOp {
    std::optional<WitnessRequest> request;
    std::optional<WitnessReply> reply;
  };

  using Way = ElasticWorldLinks::Way;

  void deliver(int from, int to);
  void detect(int i, int gone);
  void part(int i);
  void heal();
  void endConnections(int of);
  void breakConnection(int from, int to, bool sender_sees);
  bool canDetect(const Way& pair) const;
  bool canSuspect(int i, int j) const;
  bool mayVote(int i) const;
  bool canPart(int i) const;
  bool canHold(int i, int newcomer) const;
  std::optional<ElasticAction> nextQuietly() const;
  std::optional<ElasticAction> drawFault(std::mt19937_64& random) const;
  std::optional<ElasticAction> drawStep(std::mt19937_64& random) const;
  bool isCut(int a, int b) const;
  bool canSeeNewStore(int i) const;
  void carryOut(int i, ElasticEffects effects);
  void checkView(int i);
  void checkAnswer(int i, const Outcome& outcome);
  bool canVote(int i) const;
  void vote(int i, int how);
  void recover(int i, const std::set<MemberId>& absent);
  bool hasNoOtherLosses() const;
  bool runQuietly();
  std::string describeMembers() const;

  ElasticWorldOptions options_;
  std::vector<ElasticCore> cores_;
  std::vector<bool> dead_;
  std::vector<int> asked_;  // agreements of a member in its view
  std::vector<bool> pending_;
  ElasticWorldLinks links_;
  std::set<std::pair<int, int>> undetected_;  // (who does not know yet, who is gone)
  std::vector<StoreOp> asking_;               // by member: one request of the store at a time
  std::vector<uint8_t> seen_identity_;        // by member, of the store; 0: it has not looked
  std::vector<View> accepted_by_parted_;
  ElasticWorldOptions left_;  // what is left of the budgets
  ElasticWorldStore store_;
  ElasticWorldHistory history_;
};

}  // namespace torchft_ext

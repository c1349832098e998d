// What members of an elastic job tell each other. Values; decoding is total and bounded.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "elastic/view.h"

namespace torchft_ext {

enum class ElasticKind : uint8_t {
  kVote = 1,       // round A of agreement `index`: `votes`, the sender's and those that it relays
  kCompleted = 2,  // round B of it: `completed`, likewise
  kRequest = 3,    // propose the next view
  kPrepare = 4,
  kPromise = 5,
  kRefused = 6,  // a higher ballot has been promised: `ballot`
  kAccept = 7,   // `view`
  kAccepted = 8,
  kView = 9,  // `view` has been decided
  // The sender knows `number` alone: tell it the newest view; where that is it, say again what has
  // been said in it.
  kBehind = 10,
  kJoin = 11,  // a newcomer: `members` holds it
  // The sender has begun a lineage of its own: in this one it is not there any more.
  kParted = 12,
  // A newcomer tries the way to another process, and back: both carry `padding`. The driver's, not
  // the core's (elastic/way_probes.h).
  kProbe = 13,
  kProbed = 14,  // the answer; `members`: whom else the newcomer has to reach
};

// Has it taken part in an agreement of this view that was ok?
enum class Promotion : uint8_t {
  kNo = 0,
  kMaybe = 1,  // it knows all votes and has not returned
  kYes = 2,    // it has returned
};

// How far a member is in an agreement.
struct AgreementReport {
  uint64_t index = 0;
  std::optional<Vote> vote;      // its own
  std::optional<Answer> answer;  // it completed round A
  bool returned = false;
  friend bool operator==(const AgreementReport&, const AgreementReport&) = default;
};

struct Promise {
  std::optional<AcceptedView> accepted;
  std::vector<AgreementReport> agreements;  // its last two, in order
  Promotion promotion = Promotion::kNo;
  std::vector<Member> waiting;      // newcomers that it knows
  std::vector<MemberId> held_back;  // newcomers that are not to be taken in yet
  std::vector<MemberPair> cut;      // that it knows: pairs that cannot connect, its own and others'
  std::vector<MemberId> absent;     // to be left out unless they are ready; see nextView()
  std::optional<uint32_t> shard;    // whose only copy it may hold; nothing: of none
  WitnessId witness;                // the identity of the store that it reaches; zero: none
  bool ready = false;               // its user awaits a view
  bool leaving = false;
  friend bool operator==(const Promise&, const Promise&) = default;
};

struct ElasticMessage {
  ElasticKind kind = ElasticKind::kRequest;
  Lineage lineage;
  uint64_t number = 0;  // of the view that it is about: the one in which, or after which
  Ballot ballot;        // kPrepare to kAccepted
  uint64_t index = 0;   // kVote, kCompleted
  std::map<MemberId, Vote> votes;
  std::set<MemberId> completed;
  std::set<MemberPair> cut;     // kVote, kCompleted: of which the one has lost the other
  Promise promise;              // kPromise
  std::optional<View> view;     // kAccept, kView
  std::vector<Member> members;  // kJoin: the sender; kProbed
  std::set<MemberId> reached;   // kJoin: with whom it has exchanged probes
  std::string padding;          // kProbe, kProbed
  friend bool operator==(const ElasticMessage&, const ElasticMessage&) = default;
};

struct ElasticEnvelope {
  MemberId to;
  std::shared_ptr<const ElasticMessage> message;  // one for all whom it goes to
};

std::string encodeElasticMessage(const ElasticMessage& message);
std::optional<ElasticMessage> decodeElasticMessage(std::string_view bytes);

}  // namespace torchft_ext

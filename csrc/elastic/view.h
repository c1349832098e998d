// What the members of an elastic job decide: views, and the outcomes of their agreements. Values;
// any thread. The protocol is in docs/membership_protocol.md.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/identity.h"

namespace torchft_ext {

using MemberId = Identity<struct MemberIdTag>;      // one rank of one process's life, in one job
using Lineage = Identity<struct LineageTag>;        // a job's views, from its founding on
using WitnessId = Identity<struct WitnessIdTag>;    // what a store shows to be the one it was
using ViewSecret = Identity<struct ViewSecretTag>;  // what its members can prove to know
using SecretDigest = Identity<struct SecretDigestTag>;  // by which a secret is known to be the one
using ViewSeal = Identity<struct ViewSealTag>;          // that a member of the view before made it

struct Member {
  MemberId id;
  uint64_t since = 0;  // the number of the view that took it in
  std::string record;  // who and where it is, as the driver encodes it; opaque to the protocol
  friend bool operator==(const Member&, const Member&) = default;
};

// Two members between which no connection can be made; the lower id first.
using MemberPair = std::pair<MemberId, MemberId>;

// Hashes of the state and gradients that a member holds. Members with equal state have equal
// digests.
struct VoteDigest {
  std::string common{};    // of what all members hold alike; empty: it says nothing
  uint32_t shard = 0;      // the one that of_shard is about
  std::string of_shard{};  // of what the members of one shard hold alike; empty: it says nothing
  bool isEmpty() const { return common.empty() && of_shard.empty(); }
  friend bool operator==(const VoteDigest&, const VoteDigest&) = default;
};

// What one member says in an agreement.
struct Vote {
  bool ok = false;
  bool leaving = false;             // it goes once the agreement is over
  bool new_witness = false;         // it knows of one that the next view should appoint
  bool last = false;                // its user says that nothing is to come after this agreement
  std::string note;                 // the caller's bytes
  std::vector<MemberId> waiting;    // newcomers that it knows
  std::vector<MemberId> held_back;  // newcomers that are not to be taken in yet
  VoteDigest digest;
  friend bool operator==(const Vote&, const Vote&) = default;
};

// The same on all members that return from the agreement.
struct Answer {
  bool ok = false;
  std::map<MemberId, std::string> notes;  // of who voted
  std::vector<MemberId> waiting;          // ascending; without those that somebody holds back
  std::vector<MemberId> leaving;          // ascending
  bool new_witness = false;               // for the next view to appoint
  bool diverged = false;                  // not ok: digests that have to be equal are not
  bool last = false;                      // somebody said so
  friend bool operator==(const Answer&, const Answer&) = default;
};

// What the members of a later view hold for the answer of an agreement.
struct Outcome {
  uint64_t view = 0;
  uint64_t index = 0;  // of the agreement in that view, from 1
  Answer answer;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

std::vector<MemberId> idsOf(const std::vector<Member>& members);

struct View {
  Lineage lineage;
  uint64_t number = 0;            // from 1; also the generation's
  std::vector<Member> members;    // by rank
  std::vector<MemberId> voters;   // of the members, those who decide on the next view
  WitnessId witness;              // zero: there is none
  ViewSecret secret;              // drawn anew for each; zero: as it is told to others than members
  SecretDigest secret_digest;     // of it, also where the view is told without it
  ViewSeal seal;                  // elastic/view_check.h
  std::vector<Outcome> outcomes;  // of the agreements of the view before that were not over
  int old_size = 0;               // how many members the view before had
  // For the log: the voters of the view before on whose promises this one rests, and whether the
  // store was asked too.
  std::vector<MemberId> decided_by;
  bool store_decided = false;
  friend bool operator==(const View&, const View&) = default;

  int rankOf(const MemberId& id) const;  // -1: it is no member
  bool has(const MemberId& id) const { return rankOf(id) >= 0; }
  const Outcome* outcomeOf(uint64_t index) const;  // in the view before; null: none
};

// Proposals for one number are ordered by these; zero: none.
struct Ballot {
  uint32_t round = 0;
  MemberId proposer;
  bool isZero() const { return round == 0; }
  friend bool operator==(const Ballot&, const Ballot&) = default;
  friend auto operator<=>(const Ballot&, const Ballot&) = default;
};

struct AcceptedView {
  Ballot ballot;
  View view;
  friend bool operator==(const AcceptedView&, const AcceptedView&) = default;
};

// Bounds of what is decoded from a peer.
inline constexpr size_t kMostMembers = 65536;
inline constexpr size_t kLongestRecord = 4096;
inline constexpr size_t kLongestNote = size_t{1} << 20;
inline constexpr size_t kProbeBytes = size_t{64} << 10;  // more than any MTU
inline constexpr size_t kLongestDigest = 16;             // of each of its two parts
// Members are two agreements apart at most.
inline constexpr size_t kMostOutcomes = 4;

std::string encodeView(const View& view);
std::optional<View> decodeView(std::string_view bytes);
std::string encodeAccepted(const AcceptedView& accepted);
std::optional<AcceptedView> decodeAccepted(std::string_view bytes);

}  // namespace torchft_ext

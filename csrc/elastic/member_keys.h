// How the two ends of a connection between members of a job prove who they are. No secret is shown.
//
//   acceptor -> connector: a Question: a challenge, and the newest view that it is in
//   connector -> acceptor: a Claim: who it is, a challenge of its own, a view, its proof
//   acceptor -> connector: its proof
// All three are frames of type kMember, which are short.
//
// A proof is two HMAC-SHA256 over both challenges, both ids and that view. One is by the job's
// secret, which every process of the job knows. The other is by the view's own secret; the view is
// the newest that the connector knows and the acceptor may know. Two that have been members
// together before the newest view of the one who checks know that one or the view before it. So
// there the second one has to hold too, by one of these two views: who knows the job's secret
// alone, such as a newcomer, cannot pass for a member. The first view's secret stands in the
// founding, which newcomers read: so it keeps them out from the third view on.
//
// A connection that stands is judged anew in each view, by what was proved on it: who came while
// its id had to prove nothing more than the job's secret does not stay as that member.
//
// Values; any thread. An owner's MemberKeys: on its loop.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/hmac.h"
#include "elastic/meeting.h"
#include "elastic/view.h"

namespace torchft_ext {

using JobSecret = Identity<struct JobSecretTag>;

// What admits to a job's connections.
struct JobKey {
  Nonce nonce;  // shown: where a connection belongs
  JobSecret secret;
};

struct ViewName {
  Lineage lineage;
  uint64_t number = 0;  // 0: of none
  friend auto operator<=>(const ViewName&, const ViewName&) = default;
};

struct ConnectionProof {
  Digest256 by_job{};
  Digest256 by_view{};  // of who does not know that view's secret: of no meaning
};

struct ConnectionQuestion {
  Challenge challenge;
  ViewName newest;
};

struct ConnectionClaim {
  Member member;
  Challenge challenge;
  ViewName view;
  ConnectionProof proof;
};

std::string encodeQuestion(const ConnectionQuestion& question);
std::optional<ConnectionQuestion> decodeQuestion(std::string_view bytes);
std::string encodeClaim(const ConnectionClaim& claim);
std::optional<ConnectionClaim> decodeClaim(std::string_view bytes);
std::string encodeProof(const ConnectionProof& proof);
std::optional<ConnectionProof> decodeProof(std::string_view bytes);

// What a proof is about; the same at both ends.
struct ProvedConnection {
  Challenge by_acceptor;
  Challenge by_connector;
  MemberId acceptor;
  MemberId connector;
  ViewName view;
};
enum class ConnectionEnd : uint8_t { kConnector = 1, kAcceptor = 2 };

// One member's secrets: the job's, and those of the views that it has been in.
class MemberKeys {
 public:
  static constexpr size_t kMostViews = 256;  // the newest; a member asleep for longer hears nothing

  void setJob(const JobSecret& secret) { job_ = secret; }
  // self is a member of it.
  void enter(const View& view, const MemberId& self);

  ViewName newest() const;
  // What to prove to a member that is in that view: the newest of its lineage, up to it, that is
  // known here; else the one before newest(), if known, or that.
  ViewName viewFor(const ViewName& theirs) const;
  ConnectionProof prove(ConnectionEnd own, const ProvedConnection& connection) const;
  // Does it hold for the other end, which says to be that member? Then the view whose secret it has
  // shown to know; none: it knows the job's. Nothing: it does not hold. `its_end`: the prover's.
  std::optional<ViewName> provedBy(ConnectionEnd its_end, const ProvedConnection& connection,
                                   const ConnectionProof& proof) const;
  // Does a connection with that member, on which that was proved, do in the newest view too?
  bool stillHolds(const MemberId& id, const ViewName& proved_by) const;
  // Is it, by the roster, another process than the one that is a member under its id?
  bool contradictsRoster(const Member& member) const;

 private:
  bool hasToProveView(const MemberId& id) const;
  bool isRecent(const ViewName& view) const;

  JobSecret job_;
  std::map<ViewName, ViewSecret> views_;
  View roster_;  // the newest view
  MemberId self_;
};

}  // namespace torchft_ext

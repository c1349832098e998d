// How processes of a job meet without a store: at an address of one of them. Both sides of such a
// connection prove first that they know the job's key, which is never sent; then the client makes
// calls of the key-value store (view_store.h) that the other one keeps.
//
//   client -> place: a hello with meetingNonce(), to whoever listens there
//   place -> client: kAnswer, seq 0: a challenge
//   client -> place: kCall, seq 0: a challenge of its own, and its proof
//   place -> client: kAnswer, seq 0: its proof, and its standing in the job
//   client -> place: kCall, seq > 0; each is answered by a kAnswer of that seq
// At a place that answers inquiries (job_report.h) kInquiry comes instead of calls, and kReport is
// the answer. There the key follows from the job's founding.
//
// What follows the proofs is not encrypted. Pure functions and values.
#pragma once

#include <string>

#include "base/hmac.h"
#include "base/identity.h"

namespace torchft_ext {

using Challenge = Identity<struct ChallengeTag>;

struct MeetingKey {
  std::string job;  // its name
  std::string key;  // the user's
};

// Of the process at a place, as it was when the client came: the higher, the better it knows where
// the job's members are.
struct Standing {
  enum class Part : uint8_t {
    kNone = 0,     // it knows of no job that has been founded
    kLeftOut = 1,  // it has been in the job, and hears nothing new of it
    kMember = 2,
  };
  Part part = Part::kNone;
  uint64_t view = 0;  // the number of the newest one that it knows
  friend auto operator<=>(const Standing&, const Standing&) = default;
};

Nonce meetingNonce(const std::string& job);
enum class MeetingSide { kClient, kPlace };
// For who was challenged by `challenge` and challenged by `own`.
Digest256 meetingProof(const MeetingKey& key, MeetingSide side, const Challenge& challenge,
                       const Challenge& own);
bool equalInConstantTime(const Digest256& a, const Digest256& b);

}  // namespace torchft_ext

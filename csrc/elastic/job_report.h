// What a member of an elastic job answers to a process that asks how the job is: its view, the
// members, and what changed last, as this member knows it. The asking process takes no place, and
// the answer needs no quorum.
//
// Values; any thread. Decoding is total and bounded.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "elastic/meeting.h"
#include "elastic/member_keys.h"
#include "elastic/proposal.h"
#include "elastic/view.h"

namespace torchft_ext {

struct ReportedMember {
  Member member;
  Duration present{};        // since the answering member first saw it in a view; newcomers: zero
  bool is_voter = false;     // it decides on the next view; else it is a learner, or a newcomer
  bool may_be_lost = false;  // the others could decide on a view without it now
  std::string trouble;       // how it was lost, as far as is known; empty: nothing is known
  friend bool operator==(const ReportedMember&, const ReportedMember&) = default;
};

// A view that began, in words.
struct ReportedChange {
  uint64_t view = 0;
  uint32_t size = 0;
  Duration ago{};
  std::vector<std::string> joined;  // "host, pid 7"
  std::vector<std::string> gone;    // the same, with the cause where it is known
  // What the member that answered did until its groups stood, in order, and for how long.
  std::vector<std::pair<std::string, Duration>> phases;
  friend bool operator==(const ReportedChange&, const ReportedChange&) = default;
};

// How far the answering member's training loop is.
struct ReportedSteps {
  uint64_t committed = 0;
  Duration ago{};         // since the last one
  double per_second = 0;  // over the last ones, up to Progress::kMost
  friend bool operator==(const ReportedSteps&, const ReportedSteps&) = default;
};

enum class ReportedBy : uint8_t {
  kNewcomer = 0,  // it waits for a place, and knows no view
  kLeftOut = 1,   // the others went on without it: it hears nothing new
  kMember = 2,
};

struct JobReport {
  ReportedBy by = ReportedBy::kNewcomer;
  Member self;
  Lineage lineage;
  uint64_t view = 0;
  bool deciding = false;  // the members decide on the next view, or this one wants it
  bool store_rule = false;
  int min_size = 1;
  int max_size = 65536;
  WitnessId witness;      // zero: the view names none
  uint32_t size = 0;      // of the view; more than kMostReported members are not listed
  uint32_t may_lose = 0;  // so many voters may be lost at once, whichever they are
  std::vector<ReportedMember> members;  // by rank
  std::vector<ReportedMember> waiting;  // newcomers that this member knows
  std::vector<ReportedChange> changes;  // the newest first
  std::vector<std::string> waits;       // whom this member's threads wait for, each in a clause
  std::optional<ReportedSteps> steps;   // nothing: the program has told of none
  friend bool operator==(const JobReport&, const JobReport&) = default;
};

inline constexpr size_t kMostReported = 2048;  // members, and newcomers
inline constexpr size_t kMostChanges = 16;

std::string encodeJobReport(const JobReport& report);
std::optional<JobReport> decodeJobReport(std::string_view bytes);

// What an asking process proves to know, by the job's founding: the nonce is the place's name.
MeetingKey inquiryKey(const JobKey& key);

// Fills in who may be lost: `there` are the members that are not known to be lost, and `needed`
// those that hold what nobody else has.
void judgeLosses(JobReport& report, const View& view, const ElasticRules& rules,
                 const std::set<MemberId>& there, const std::set<MemberId>& needed);

}  // namespace torchft_ext

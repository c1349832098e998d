#include "elastic/agreements.h"

#include <algorithm>
#include <utility>

#include "net/frame.h"

namespace torchft_ext {
namespace {

ElasticMessage voteMessage(uint64_t index, const Vote& vote) {
  ElasticMessage message;
  message.kind = ElasticKind::kVote;
  message.index = index;
  message.vote = vote;
  return message;
}

ElasticMessage completedMessage(uint64_t index) {
  ElasticMessage message;
  message.kind = ElasticKind::kCompleted;
  message.index = index;
  return message;
}

const AgreementReport* reportOf(const std::vector<AgreementReport>& reports, uint64_t index) {
  const auto found =
      std::find_if(reports.begin(), reports.end(),
                   [&](const AgreementReport& report) { return report.index == index; });
  return found == reports.end() ? nullptr : &*found;
}

Answer recoveredAnswer(uint64_t index,
                       const std::map<MemberId, std::vector<AgreementReport>>& reports) {
  std::map<MemberId, Vote> votes;
  bool all_voted = true;
  for (const auto& [member, own] : reports) {
    const AgreementReport* report = reportOf(own, index);
    if (report != nullptr && report->answer) return *report->answer;
    if (report != nullptr && report->vote) {
      votes[member] = *report->vote;
    } else {
      all_voted = false;
    }
  }
  Answer answer = Agreements::answerOf(votes);
  answer.ok = answer.ok && all_voted;
  return answer;
}

}  // namespace

Agreements::Agreements(MemberId self, const std::vector<Member>& members, bool second_round)
    : self_(self), second_round_(second_round) {
  for (const Member& member : members) members_.insert(member.id);
}

bool Agreements::pending() const {
  const auto found = rounds_.find(mine_);
  return mine_ > 0 && found != rounds_.end() && !found->second.returned;
}

bool Agreements::hasVotesOfAllBut(const std::set<MemberId>& gone) const {
  const auto round = rounds_.find(mine_);
  return round != rounds_.end() &&
         std::all_of(members_.begin(), members_.end(), [&](const MemberId& member) {
           return gone.contains(member) || round->second.votes.contains(member);
         });
}

bool Agreements::awaits(const MemberId& other) const {
  if (!pending() || !members_.contains(other)) return false;
  const Round& round = rounds_.at(mine_);
  return round.answer ? !round.completed.contains(other) : !round.votes.contains(other);
}

Agreements::Step Agreements::vote(const Vote& vote) {
  ++mine_;
  rounds_.erase(rounds_.begin(), rounds_.lower_bound(mine_ < 1 ? 0 : mine_ - 1));
  rounds_[mine_].votes[self_] = vote;
  if (stopped_) return {};
  Step step;
  step.to_all.push_back(voteMessage(mine_, vote));
  Step more = advance();
  for (ElasticMessage& message : more.to_all) step.to_all.push_back(std::move(message));
  step.returned = std::move(more.returned);
  return step;
}

Agreements::Step Agreements::hear(const MemberId& from, const ElasticMessage& message) {
  // Nobody can be further ahead than by one: it needs this member's vote.
  if (stopped_ || !members_.contains(from) || message.index > mine_ + 1 ||
      message.index + 1 < mine_ || message.index == 0) {
    return {};
  }
  Round& round = rounds_[message.index];
  if (message.kind == ElasticKind::kVote) {
    round.votes.try_emplace(from, message.vote);
  } else {
    round.completed.insert(from);
  }
  return advance();
}

Agreements::Step Agreements::advance() {
  Step step;
  if (!pending()) return step;
  Round& round = rounds_[mine_];
  if (!round.answer && round.votes.size() == members_.size()) {
    round.answer = answerOf(round.votes);
    round.completed.insert(self_);
    step.to_all.push_back(completedMessage(mine_));
  }
  if (round.answer && (round.completed.size() == members_.size() || !second_round_)) {
    round.returned = true;
    returned_ok_ = returned_ok_ || round.answer->ok;
    step.returned = Outcome{0, mine_, *round.answer};
  }
  return step;
}

std::vector<ElasticMessage> Agreements::saidSoFar() const {
  std::vector<ElasticMessage> said;
  if (stopped_) return said;
  for (const auto& [index, round] : rounds_) {
    const auto own = round.votes.find(self_);
    if (own == round.votes.end()) continue;
    said.push_back(voteMessage(index, own->second));
    if (round.answer) said.push_back(completedMessage(index));
  }
  return said;
}

std::vector<AgreementReport> Agreements::reports() const {
  std::vector<AgreementReport> reports;
  for (const auto& [index, round] : rounds_) {
    const auto own = round.votes.find(self_);
    if (own == round.votes.end()) continue;
    reports.push_back({index, own->second, round.answer, round.returned});
  }
  return reports;
}

Promotion Agreements::promotion() const {
  if (returned_ok_) return Promotion::kYes;
  for (const auto& [index, round] : rounds_) {
    if (round.answer && round.answer->ok) return Promotion::kMaybe;
  }
  return Promotion::kNo;
}

std::string Agreements::fingerprint() const {
  ByteWriter writer;
  for (const auto& [index, round] : rounds_) {
    writer.u64(index);
    for (const auto& [member, vote] : round.votes) {
      writer.raw(member.bytes);
      writer.text(encodeElasticMessage(voteMessage(index, vote)));
    }
    writer.u32(static_cast<uint32_t>(round.completed.size()));
    for (const MemberId& member : round.completed) writer.raw(member.bytes);
    writer.u8(static_cast<uint8_t>((round.answer ? 1 : 0) | (round.returned ? 2 : 0)));
  }
  writer.u64(mine_);
  writer.u8(static_cast<uint8_t>((stopped_ ? 1 : 0) | (returned_ok_ ? 2 : 0)));
  return writer.take();
}

Answer Agreements::answerOf(const std::map<MemberId, Vote>& votes) {
  Answer answer;
  answer.ok = !votes.empty();
  std::set<MemberId> waiting;
  for (const auto& [member, vote] : votes) {
    answer.ok = answer.ok && vote.ok;
    answer.notes[member] = vote.note;
    if (vote.leaving) answer.leaving.push_back(member);
    answer.new_witness = answer.new_witness || vote.new_witness;
    waiting.insert(vote.waiting.begin(), vote.waiting.end());
  }
  answer.waiting.assign(waiting.begin(), waiting.end());
  return answer;
}

std::vector<Outcome> outcomesOf(uint64_t view,
                                const std::map<MemberId, std::vector<AgreementReport>>& reports) {
  std::set<uint64_t> indices;
  for (const auto& [member, own] : reports) {
    for (const AgreementReport& report : own) indices.insert(report.index);
  }
  std::vector<Outcome> outcomes;
  outcomes.reserve(indices.size());
  for (const uint64_t index : indices) {
    outcomes.push_back({view, index, recoveredAnswer(index, reports)});
  }
  return outcomes;
}

}  // namespace torchft_ext

#include "elastic/agreements.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "net/frame.h"

namespace torchft_ext {
namespace {

// So many pairs are passed on for. A member with more is hardly connected at all, or frozen:
// without it the others are better off.
constexpr size_t kMostCut = 3;

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

// Parts that are empty say nothing.
bool haveDiverged(const std::map<MemberId, Vote>& votes) {
  std::set<std::string_view> common;
  std::map<uint32_t, std::string_view> of_shards;
  bool diverged = false;
  for (const auto& [member, vote] : votes) {
    const VoteDigest& digest = vote.digest;
    if (!digest.common.empty()) common.insert(digest.common);
    if (digest.of_shard.empty()) continue;
    const auto [first, fresh] = of_shards.try_emplace(digest.shard, digest.of_shard);
    diverged = diverged || (!fresh && first->second != digest.of_shard);
  }
  return diverged || common.size() > 1;
}

}  // namespace

Agreements::Agreements(MemberId self, const View& view, bool may_relay, bool second_round)
    : self_(self),
      lineage_(view.lineage),
      view_(view.number),
      ranks_(idsOf(view.members)),
      may_relay_(may_relay),
      relayed_(may_relay),
      second_round_(second_round) {
  members_.insert(ranks_.begin(), ranks_.end());
  chart();
}

void Agreements::chart() {
  hops_ = hopsOf(ranks_, self_, relayed_);
  if (cut_.size() > kMostCut) return;
  const std::vector<Hop> around = detoursOf(cut_, self_);
  hops_.insert(hops_.end(), around.begin(), around.end());
}

ElasticMessage Agreements::make(ElasticKind kind, uint64_t index) const {
  ElasticMessage message;
  message.kind = kind;
  message.lineage = lineage_;
  message.number = view_;
  message.index = index;
  message.cut = cut_;
  return message;
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
  return stopped_ ? Step{} : advance();
}

Agreements::Step Agreements::hear(const MemberId& from, const ElasticMessage& message) {
  // Nobody can be further ahead than by one: it needs this member's vote.
  if (stopped_ || !members_.contains(from) || message.index > mine_ + 1 ||
      message.index + 1 < mine_ || message.index == 0) {
    return {};
  }
  const auto counts = [&](const MemberId& member) {
    return member == from || (may_relay_ && members_.contains(member));
  };
  Round& round = rounds_[message.index];
  for (const auto& [member, vote] : message.votes) {
    if (counts(member)) round.votes.try_emplace(member, vote);
  }
  for (const MemberId& member : message.completed) {
    if (counts(member)) round.completed.insert(member);
  }
  Step step;
  hearCut(message, step);
  Step next = advance();
  std::move(next.sends.begin(), next.sends.end(), std::back_inserter(step.sends));
  step.returned = std::move(next.returned);
  return step;
}

Agreements::Step Agreements::tellDirectly() {
  if (!relayed_) return {};
  relayed_ = false;
  return tellAnew();
}

Agreements::Step Agreements::lose(const MemberId& other) {
  if (!may_relay_ || !members_.contains(other) || cut_.size() > kMostCut) return tellDirectly();
  if (!cut_.insert(std::minmax(self_, other)).second) return {};
  relayed_ = false;
  return tellAnew();
}

void Agreements::hearCut(const ElasticMessage& message, Step& step) {
  if (!may_relay_) return;
  const size_t before = cut_.size();
  for (const MemberPair& pair : message.cut) {
    if (cut_.size() > kMostCut) break;
    if (members_.contains(pair.first) && members_.contains(pair.second)) cut_.insert(pair);
  }
  if (cut_.size() == before) return;
  relayed_ = false;
  step = tellAnew();
}

bool Agreements::mayPassOn(const MemberId& lost, const std::set<MemberId>& gone) const {
  return may_relay_ && cut_.size() <= kMostCut &&
         std::any_of(ranks_.begin(), ranks_.end(), [&](const MemberId& other) {
           return other != self_ && other != lost && !gone.contains(other) &&
                  !cut_.contains(std::minmax(other, lost));
         });
}

Agreements::Step Agreements::tellAnew() {
  Step step;
  chart();
  for (auto& [index, round] : rounds_) {  // of the one before too: who was slower may be in it
    round.votes_told.clear();
    round.completed_told.clear();
    if (!stopped_) tell(index, round, step);
  }
  return step;
}

Agreements::Step Agreements::advance() {
  Step step;
  if (!pending()) return step;
  Round& round = rounds_[mine_];
  if (!round.answer && round.votes.size() == members_.size()) {
    round.answer = answerOf(round.votes);
    round.completed.insert(self_);
  }
  tell(mine_, round, step);
  if (round.answer && (round.completed.size() == members_.size() || !second_round_)) {
    round.returned = true;
    returned_ok_ = returned_ok_ || round.answer->ok;
    step.returned = Outcome{view_, mine_, *round.answer};
  }
  return step;
}

// Sends what is due by now, in one message where several hops say the same.
void Agreements::tell(uint64_t index, Round& round, Step& step) const {
  if (!round.votes.contains(self_)) return;
  const auto isKnown = [](const auto& known, const Hop& hop) {
    return std::all_of(hop.about.begin(), hop.about.end(),
                       [&](const MemberId& member) { return known.contains(member); });
  };
  const auto sendDue = [&](std::vector<bool>& told, const auto& known, auto fill) {
    told.resize(hops_.size());
    const Hop* last = nullptr;
    for (size_t i = 0; i < hops_.size(); ++i) {
      const Hop& hop = hops_[i];
      if (told[i] || !isKnown(known, hop)) continue;
      told[i] = true;
      const bool same = last != nullptr && last->about == hop.about;
      step.sends.push_back({hop.to, same ? step.sends.back().message : fill(hop)});
      last = &hop;
    }
  };
  sendDue(round.votes_told, round.votes, [&](const Hop& hop) {
    ElasticMessage message = make(ElasticKind::kVote, index);
    for (const MemberId& member : hop.about) message.votes[member] = round.votes.at(member);
    return std::make_shared<const ElasticMessage>(std::move(message));
  });
  if (!round.answer) return;
  sendDue(round.completed_told, round.completed, [&](const Hop& hop) {
    ElasticMessage message = make(ElasticKind::kCompleted, index);
    message.completed.insert(hop.about.begin(), hop.about.end());
    return std::make_shared<const ElasticMessage>(std::move(message));
  });
}

std::vector<ElasticMessage> Agreements::saidSoFar() const {
  std::vector<ElasticMessage> said;
  if (stopped_) return said;
  for (const auto& [index, round] : rounds_) {
    if (!round.votes.contains(self_)) continue;
    said.push_back(make(ElasticKind::kVote, index));
    said.back().votes = round.votes;
    if (!round.answer) continue;
    said.push_back(make(ElasticKind::kCompleted, index));
    said.back().completed = round.completed;
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
    ElasticMessage votes = make(ElasticKind::kVote, index);
    votes.votes = round.votes;
    writer.text(encodeElasticMessage(votes));
    writer.u32(static_cast<uint32_t>(round.completed.size()));
    for (const MemberId& member : round.completed) writer.raw(member.bytes);
    writer.u8(static_cast<uint8_t>((round.answer ? 1 : 0) | (round.returned ? 2 : 0)));
    for (const std::vector<bool>* told : {&round.votes_told, &round.completed_told}) {
      writer.u32(static_cast<uint32_t>(told->size()));
      for (const bool one : *told) writer.u8(one ? 1 : 0);
    }
  }
  for (const auto& [one, other] : cut_) {
    writer.raw(one.bytes);
    writer.raw(other.bytes);
  }
  writer.u64(mine_);
  writer.u8(static_cast<uint8_t>((stopped_ ? 1 : 0) | (returned_ok_ ? 2 : 0) | (relayed_ ? 4 : 0)));
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
    answer.last = answer.last || vote.last;
    waiting.insert(vote.waiting.begin(), vote.waiting.end());
  }
  for (const auto& [member, vote] : votes) {
    for (const MemberId& id : vote.held_back) waiting.erase(id);
  }
  answer.waiting.assign(waiting.begin(), waiting.end());
  answer.diverged = haveDiverged(votes);
  answer.ok = answer.ok && !answer.diverged;
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

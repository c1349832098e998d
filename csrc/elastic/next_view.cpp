#include "elastic/next_view.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "elastic/agreements.h"
#include "elastic/quorum.h"

namespace torchft_ext {
namespace {

using Pairs = std::set<MemberPair>;

// Of those who stay: for the sake of one that goes anyway nobody has to go too.
Pairs pairsOf(const std::map<MemberId, Promise>& promises, const std::set<MemberId>& going) {
  const auto stays = [&](const MemberId& id) {
    const auto promise = promises.find(id);
    return promise != promises.end() && !promise->second.leaving && !going.contains(id);
  };
  Pairs pairs;
  for (const auto& [member, promise] : promises) {
    for (const auto& [one, other] : promise.cut) {
      if (one != other && stays(one) && stays(other)) pairs.insert(std::minmax(one, other));
    }
  }
  return pairs;
}

size_t pairsWith(const Pairs& pairs, const MemberId& id) {
  return static_cast<size_t>(std::count_if(pairs.begin(), pairs.end(), [&](const auto& pair) {
    return pair.first == id || pair.second == id;
  }));
}

bool isVoter(const View& view, const MemberId& id) {
  return std::find(view.voters.begin(), view.voters.end(), id) != view.voters.end();
}

// A learner before a voter, the one with the most pairs, the later one: later ranks joined later.
std::optional<MemberId> worstOf(const View& base, const Pairs& pairs) {
  std::optional<MemberId> worst;
  std::pair<bool, size_t> most{false, 0};
  for (const Member& member : base.members) {
    const std::pair<bool, size_t> weight{!isVoter(base, member.id), pairsWith(pairs, member.id)};
    if (weight.second > 0 && (!worst || weight >= most)) {
      worst = member.id;
      most = weight;
    }
  }
  return worst;
}

// Members that somebody gave up waiting for, and that still do not await a view themselves.
std::set<MemberId> calledAbsent(const std::map<MemberId, Promise>& promises) {
  std::set<MemberId> absent;
  for (const auto& [member, promise] : promises) {
    for (const MemberId& id : promise.absent) {
      const auto found = promises.find(id);
      if (found != promises.end() && !found->second.ready) absent.insert(id);
    }
  }
  return absent;
}

// The shards that these members hold.
std::set<uint32_t> shardsOf(const std::map<MemberId, Promise>& promises,
                            const std::set<MemberId>& members) {
  std::set<uint32_t> shards;
  for (const MemberId& id : members) {
    if (promises.at(id).shard) shards.insert(*promises.at(id).shard);
  }
  return shards;
}

// Whether the ready members may exclude the others: one fast member must not exclude all slow ones.
bool mayGoOn(const View& base, const std::vector<MemberId>& voters,
             const std::map<MemberId, Promise>& promises, const std::set<MemberId>& ready,
             const std::set<MemberId>& others, const ElasticRules& rules) {
  if (ready.size() < static_cast<size_t>(rules.min_size)) return false;
  if (quorumOf({voters}, ready, !base.witness.isZero()) == QuorumState::kNone) return false;
  const std::set<uint32_t> kept = shardsOf(promises, ready);
  const std::set<uint32_t> wanted = shardsOf(promises, others);
  return std::includes(kept.begin(), kept.end(), wanted.begin(), wanted.end());
}

// The promisers that would stay without these.
std::set<MemberId> stayingWithout(const std::map<MemberId, Promise>& promises,
                                  const std::set<MemberId>& going) {
  std::set<MemberId> staying;
  for (const auto& [member, promise] : promises) {
    if (!promise.leaving && !going.contains(member)) staying.insert(member);
  }
  return staying;
}

std::set<MemberId> unionOf(std::set<MemberId> one, const std::set<MemberId>& other) {
  one.insert(other.begin(), other.end());
  return one;
}

std::vector<Outcome> outcomesAfter(const View& base, const std::map<MemberId, Promise>& promises) {
  std::map<MemberId, std::vector<AgreementReport>> reports;
  for (const auto& [member, promise] : promises) reports[member] = promise.agreements;
  return outcomesOf(base.number, reports);
}

// The store as it is now, where nobody says that it is still the one of `base`.
WitnessId witnessAfter(const View& base, const std::map<MemberId, Promise>& promises) {
  WitnessId next = base.witness;
  for (const auto& [member, promise] : promises) {
    if (promise.witness.isZero()) continue;
    if (promise.witness == base.witness) return base.witness;
    next = promise.witness;
  }
  return next;
}

bool promoted(const std::map<MemberId, Promise>& promises, const std::vector<Outcome>& outcomes) {
  const bool by_promiser = std::any_of(promises.begin(), promises.end(), [](const auto& promise) {
    return promise.second.promotion != Promotion::kNo;
  });
  return by_promiser || std::any_of(outcomes.begin(), outcomes.end(),
                                    [](const Outcome& outcome) { return outcome.answer.ok; });
}

void takeIn(View& next, const std::map<MemberId, Promise>& promises, const std::set<MemberId>& gone,
            int max_size) {
  std::map<MemberId, Member> waiting;
  for (const auto& [member, promise] : promises) {
    for (const Member& newcomer : promise.waiting) waiting.emplace(newcomer.id, newcomer);
  }
  for (const auto& [member, promise] : promises) {
    for (const MemberId& id : promise.held_back) waiting.erase(id);
  }
  for (auto& [id, newcomer] : waiting) {
    if (next.members.size() >= static_cast<size_t>(max_size)) return;
    if (gone.contains(id) || next.has(id)) continue;
    newcomer.since = next.number;
    next.members.push_back(newcomer);
  }
}

}  // namespace

std::set<MemberId> losersOfPairs(const View& base, const std::map<MemberId, Promise>& promises,
                                 const std::set<MemberId>& going) {
  Pairs pairs = pairsOf(promises, going);
  std::set<MemberId> losers;
  while (!pairs.empty()) {
    const std::optional<MemberId> worst = worstOf(base, pairs);
    if (!worst) break;
    losers.insert(*worst);
    std::erase_if(pairs,
                  [&](const auto& pair) { return pair.first == *worst || pair.second == *worst; });
  }
  return losers;
}

// The members to exclude: gone, absent, or losers of a pair that cannot connect. Absent members
// stay if the ready ones may not go on without them.
static std::set<MemberId> goingFrom(const View& base, const std::vector<MemberId>& voters,
                                    const std::map<MemberId, Promise>& promises,
                                    const std::set<MemberId>& gone, const ElasticRules& rules) {
  const auto withLosers = [&](const std::set<MemberId>& going) {
    return unionOf(losersOfPairs(base, promises, going), going);
  };
  const std::set<MemberId> absent = calledAbsent(promises);
  std::set<MemberId> without = withLosers(unionOf(absent, gone));
  if (absent.empty() || !rules.parts.ready_are_enough) return without;
  std::set<MemberId> others;
  for (const MemberId& id : absent) {
    if (!gone.contains(id) && !promises.at(id).leaving) others.insert(id);
  }
  const std::set<MemberId> ready = stayingWithout(promises, without);
  return mayGoOn(base, voters, promises, ready, others, rules) ? without : withLosers(gone);
}

View nextView(const View& base, const std::map<MemberId, Promise>& promises,
              const std::set<MemberId>& gone, const ElasticRules& rules) {
  View next;
  next.lineage = base.lineage;
  next.number = base.number + 1;
  next.witness = witnessAfter(base, promises);
  next.old_size = static_cast<int>(base.members.size());
  next.outcomes = outcomesAfter(base, promises);
  const bool all_vote = promoted(promises, next.outcomes);
  const std::set<MemberId> going =
      goingFrom(base, all_vote ? idsOf(base.members) : base.voters, promises, gone, rules);
  for (const Member& member : base.members) {
    const auto promise = promises.find(member.id);
    const bool votes = all_vote || isVoter(base, member.id);
    if (votes && promise != promises.end()) next.decided_by.push_back(member.id);
    if (promise == promises.end() || promise->second.leaving || going.contains(member.id)) {
      continue;
    }
    next.members.push_back(member);
    if (votes) next.voters.push_back(member.id);
  }
  takeIn(next, promises, gone, rules.max_size);
  if (next.voters.empty()) {  // all of them leave: they hand over to who stays
    next.voters = idsOf(next.members);
  }
  return next;
}

}  // namespace torchft_ext

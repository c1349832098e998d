// Who tells whom in a round of an agreement.
#include "elastic/spread.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "elastic/elastic_core.h"

namespace torchft_ext {
namespace {

MemberId idOf(size_t number) {
  MemberId id;
  id.bytes[0] = static_cast<uint8_t>(number + 1);
  return id;
}

std::vector<MemberId> ranksOf(size_t size) {
  std::vector<MemberId> ranks;
  for (size_t i = 0; i < size; ++i) ranks.push_back(idOf(i));
  return ranks;
}

// What each knows once nobody has anything to tell any more, and how many messages that took.
struct Outspread {
  explicit Outspread(size_t size, bool relayed) {
    const std::vector<MemberId> ranks = ranksOf(size);
    std::map<MemberId, std::vector<Hop>> hops;
    std::map<MemberId, size_t> told;
    for (const MemberId& id : ranks) {
      hops[id] = hopsOf(ranks, id, relayed);
      known[id].insert(id);
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (const MemberId& id : ranks) {
        if (told[id] == hops[id].size()) continue;
        const Hop& hop = hops[id][told[id]];
        const bool ready =
            std::all_of(hop.about.begin(), hop.about.end(),
                        [&](const MemberId& one) { return known[id].contains(one); });
        if (!ready) continue;
        known[hop.to].insert(hop.about.begin(), hop.about.end());
        ++told[id];
        ++messages;
        moved = true;
      }
    }
  }
  std::map<MemberId, std::set<MemberId>> known;
  size_t messages = 0;
};

TEST(Spread, ReachesEverybody) {
  for (size_t size = 1; size <= 20; ++size) {
    for (const bool relayed : {false, true}) {
      const Outspread done(size, relayed);
      for (const auto& [id, known] : done.known) EXPECT_EQ(known.size(), size) << relayed;
    }
  }
}

TEST(Spread, TakesAsManyMessagesOfEachAsItsSizeHasDigits) {
  for (size_t size = 2; size <= 20; ++size) {
    const auto each = static_cast<size_t>(std::ceil(std::log2(size)));
    EXPECT_EQ(Outspread(size, true).messages, size * each);
    EXPECT_EQ(Outspread(size, false).messages, size * (size - 1));
  }
}

// Members of one view whose messages arrive at once, but for some that are lost.
class Agreeing {
 public:
  explicit Agreeing(size_t size) {
    View view;
    view.lineage.bytes[0] = 1;
    view.number = 1;
    for (const MemberId& id : ranksOf(size)) {
      view.members.push_back({id, 1, {}});
      view.voters.push_back(id);
    }
    for (size_t i = 0; i < size; ++i) cores.emplace_back(view.members[i], ElasticRules{}, view);
  }
  void carryOut(size_t from, const ElasticEffects& effects) {
    for (const Outcome& outcome : effects.answers) {
      answers[from] = outcome.answer;
      ++returned[from];
    }
    for (const auto& [to, message] : effects.sends) {
      const auto receiver = static_cast<size_t>(to.bytes[0] - 1);
      if (receiver == dead || cut.contains(std::minmax(from, receiver))) continue;
      ++messages;
      carryOut(receiver, cores[receiver].receive(idOf(from), *message));
    }
  }
  void vote(size_t i) {
    Vote yes;
    yes.ok = true;
    yes.note = "note " + std::to_string(i);
    carryOut(i, cores[i].agree(1, yes));
  }

  std::vector<ElasticCore> cores;
  std::map<size_t, Answer> answers;
  std::map<size_t, int> returned;  // from so many agreements
  size_t messages = 0;
  size_t dead = 1000;
  std::set<std::pair<size_t, size_t>> cut;  // no word gets from the one to the other
};

TEST(Spread, AnAgreementOfEightTakesSixMessagesOfEach) {
  Agreeing members(8);
  for (size_t i = 0; i < 8; ++i) members.vote(i);
  EXPECT_EQ(members.messages, 8U * 6U);
  ASSERT_EQ(members.answers.size(), 8U);
  for (const auto& [member, answer] : members.answers) {
    EXPECT_TRUE(answer.ok);
    EXPECT_EQ(answer.notes, members.answers[0].notes);
    EXPECT_EQ(answer.notes.size(), 8U);
  }
}

TEST(Spread, AnAgreementOfFourTakesOneHopInEachRound) {
  Agreeing members(4);
  for (size_t i = 0; i < 4; ++i) members.vote(i);
  EXPECT_EQ(members.messages, 4U * 6U);
  EXPECT_EQ(members.answers.size(), 4U);
}

// Who tells of others may be anybody of the job where it has just come; so it is heard about them
// only where relays need it.
TEST(Spread, IsHeardOfOthersInLargerViewsAlone) {
  for (const size_t size : {4U, 5U}) {
    Agreeing members(size);
    ElasticMessage told;
    told.kind = ElasticKind::kVote;
    told.lineage = members.cores[0].view().lineage;
    told.number = told.index = 1;
    for (size_t i = 1; i < size; ++i) told.votes[idOf(i)].ok = true;
    ElasticCore& core = members.cores[0];
    Vote yes;
    yes.ok = true;
    core.agree(1, yes);
    core.receive(idOf(1), told);
    EXPECT_EQ(core.promotion(), size == 4 ? Promotion::kNo : Promotion::kMaybe) << size;
  }
}

// It would have passed on the votes of those before it.
TEST(Spread, TheVotesOfTheLivingReachAllWhereOneIsLost) {
  Agreeing members(8);
  members.dead = 3;
  for (size_t i = 0; i < 8; ++i) {
    if (i != 3) members.vote(i);
  }
  EXPECT_TRUE(members.answers.empty());
  for (size_t i = 0; i < 8; ++i) {
    if (i != 3) members.carryOut(i, members.cores[i].lose(idOf(3), Loss::kDead));
  }
  ASSERT_EQ(members.answers.size(), 7U);  // by another view
  for (const auto& [member, answer] : members.answers) {
    EXPECT_TRUE(answer.ok);
    EXPECT_EQ(members.cores[member].view().number, 2U);
  }
}

// Two members that are cut from each other: in how many agreements of three, in one view, does
// everybody get the answer, where nobody ever asks again? `when` of the eight have voted in the
// first one when they notice; the first of the pair alone, or both.
int agreementsOfPair(size_t one, size_t other, size_t when, bool both) {
  Agreeing members(8);
  members.cut = {std::minmax(one, other)};
  for (size_t step = 0; step < 3; ++step) {
    for (size_t i = 0; i < 8; ++i) {
      if (step == 0 && i == when) {
        members.carryOut(one, members.cores[one].lose(idOf(other), Loss::kUnreachable));
        if (both) members.carryOut(other, members.cores[other].lose(idOf(one), Loss::kFrozen));
      }
      members.vote(i);
    }
  }
  int least = 3;
  for (size_t i = 0; i < 8; ++i) {
    const bool good = members.cores[i].view().number == 1 && members.answers[i].ok;
    least = std::min(least, good ? members.returned[i] : 0);
  }
  return least;
}

TEST(Spread, NobodyAsksAgainWhereTwoAreCutFromEachOther) {
  for (size_t one = 0; one < 8; ++one) {
    for (size_t other = 0; other < 8; ++other) {
      for (const size_t when : {0U, 4U, 7U}) {
        if (one == other) continue;
        EXPECT_EQ(agreementsOfPair(one, other, when, true), 3)
            << one << " " << other << " " << when;
        EXPECT_EQ(agreementsOfPair(one, other, when, false), 3) << one << " " << other;
      }
    }
  }
}

// Each of the others waits for the word of those that may reach it, until some say that they do
// not.
TEST(Spread, AMemberThatNobodyReachesEndsTheViewWhereNobodyAsksAgain) {
  Agreeing members(8);
  for (size_t i = 0; i < 8; ++i) members.cut.insert(std::minmax(i, size_t{3}));
  for (size_t i = 0; i < 8; ++i) members.vote(i);
  for (const size_t i : {0U, 1U, 2U, 4U}) {
    EXPECT_EQ(members.cores[0].view().number, 1U);
    members.carryOut(i, members.cores[i].lose(idOf(3), Loss::kFrozen));
  }
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(members.cores[i].view().number, i == 3 ? 1U : 2U);
  EXPECT_FALSE(members.answers.contains(3));
  EXPECT_EQ(members.answers.size(), 7U);
}

// One that does not find out is not waited for without end.
TEST(Spread, AMemberThatOneAloneHasLostEndsTheViewAfterAWhile) {
  Agreeing members(8);
  for (size_t i = 0; i < 8; ++i) members.cut.insert(std::minmax(i, size_t{3}));
  for (size_t i = 0; i < 8; ++i) members.vote(i);
  members.carryOut(0, members.cores[0].lose(idOf(3), Loss::kFrozen));
  int questions = 0;
  for (; members.cores[0].view().number == 1 && questions < 100; ++questions) {
    members.carryOut(0, members.cores[0].askAgain());
  }
  EXPECT_GT(questions, 10);
  EXPECT_EQ(members.cores[0].view().number, 2U);
}

// In the middle of an agreement all are cut from one member, and one of them knows it.
void cutFromAll(Agreeing& members) {
  for (size_t i = 0; i < 8; ++i) members.cut.insert(std::minmax(i, size_t{3}));
  for (size_t i = 0; i < 8; ++i) members.vote(i);
  members.carryOut(0, members.cores[0].lose(idOf(3), Loss::kFrozen));
}

TEST(Spread, TheWordOfALostMemberIsAskedOfOneAfterTheOther) {
  Agreeing members(8);
  cutFromAll(members);
  std::vector<size_t> asked;
  for (int question = 0; question < 7; ++question) {
    for (const auto& [to, message] : members.cores[0].askAgain().sends) {
      ASSERT_EQ(message->kind, ElasticKind::kBehind);
      if (to != idOf(3)) asked.push_back(static_cast<size_t>(to.bytes[0] - 1));
    }
  }
  EXPECT_EQ(asked, (std::vector<size_t>{1, 2, 4, 5, 6, 7, 1}));
}

TEST(Spread, WhatWasAskedForAnAgreementCountsNotForTheNext) {
  Agreeing members(8);
  for (int agreement = 1; agreement <= 2; ++agreement) {
    cutFromAll(members);
    for (int question = 0; question < 15; ++question) {
      members.carryOut(0, members.cores[0].askAgain());
    }
    ASSERT_EQ(members.cores[0].view().number, 1U) << agreement;
    members.cut.clear();
    for (size_t i = 0; i < 8; ++i) {
      if (i == 3) continue;
      members.carryOut(3, members.cores[3].connected(idOf(i)));
      members.carryOut(i, members.cores[i].connected(idOf(3)));
    }
    ASSERT_EQ(members.returned[0], agreement);
  }
}

}  // namespace
}  // namespace torchft_ext

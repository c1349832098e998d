// Who is left out of a view goes on telling others of it: the members that decided on it may be
// dead by then.
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "cpp/elastic/elastic_cores.h"

namespace torchft_ext {
namespace {

using namespace elastic_test;  // NOLINT(google-build-using-namespace)

// Five members, of which the first has a view decided that is without the two after it. These two
// have accepted it, and the last two have not.
class LeftOut : public ElasticCores {
 protected:
  LeftOut() {
    make(firstView(5), ElasticRules{}, /*newcomers=*/0);
    for (const size_t i : {1U, 2U}) cores_[i].setReady(false);
    cores_[0].leaveOut({idOf(1), idOf(2)});
    ElasticCores::carryOut(0, cores_[0].want(1));
    deliver(
        [](const Message& one) { return one.to < 3 || one.words->kind == ElasticKind::kPrepare; });
    EXPECT_EQ(cores_[0].view().number, 2U);
    EXPECT_EQ(cores_[0].view().members.size(), 3U);
    for (const size_t i : {3U, 4U}) EXPECT_EQ(cores_[i].view().number, 1U);
  }

  void lose(size_t id) {
    for (const size_t i : {3U, 4U}) carryOut(i, cores_[i].lose(idOf(id), Loss::kDead));
    for (const size_t i : {3U, 4U}) carryOut(i, cores_[i].want(cores_[i].view().number));
  }
  void expectThatTheLastTwoGoOn() {
    for (const size_t i : {3U, 4U}) {
      EXPECT_EQ(cores_[i].state(), ElasticCore::State::kActive) << i;
      EXPECT_EQ(cores_[i].view().members.size(), 2U) << i;
    }
    EXPECT_EQ(cores_[3].view(), cores_[4].view());
    EXPECT_FALSE(cores_[3].view().secret.isZero());
  }
};

TEST_F(LeftOut, MembersTellAllOthersAndMayGoAtOnce) {
  deliver([](const Message& one) { return one.from != 0; });
  lose(0);
  lose(1);
  lose(2);
  deliver([](const Message& one) { return one.from >= 3 && one.to >= 3; });
  expectThatTheLastTwoGoOn();
}

TEST_F(LeftOut, MembersThatAreAskedKnowItWithItsSecretWhereTheyHaveAcceptedIt) {
  under_way_.clear();
  lose(0);
  deliver([](const Message& one) { return one.to != 0; });
  expectThatTheLastTwoGoOn();
}

// The view that the first member has had decided, as others than its members are told it.
ElasticMessage withoutSecret(const View& view) {
  ElasticMessage told;
  told.kind = ElasticKind::kView;
  told.lineage = view.lineage;
  told.number = view.number;
  told.view = view;
  told.view->secret = {};
  return told;
}

// Nobody but its members is told the secret, so who has not accepted it does not know it either.
TEST_F(LeftOut, MembersAreNotBelievedWhereTheyTellAMemberNoSecret) {
  EXPECT_FALSE(cores_[3].receive(idOf(1), withoutSecret(cores_[0].view())).new_view);
  EXPECT_EQ(cores_[3].view().number, 1U);
}

// It answers, but will not promise any more: who waited for its promise would wait for ever.
TEST_F(LeftOut, MembersThatDoNotKnowTheSecretAreNotWaitedFor) {
  under_way_.clear();
  lose(0);
  lose(2);
  EXPECT_FALSE(hopeless_);
  for (const size_t i : {3U, 4U}) {
    carryOut(i, cores_[i].receive(idOf(1), withoutSecret(cores_[0].view())));
  }
  deliver([](const Message& one) { return one.from >= 3 && one.to >= 3; });
  EXPECT_TRUE(hopeless_);  // of five voters two are left, and they know that
}

// One member that has the secret and may be heard again is enough: no quorum is needed any more.
TEST_F(LeftOut, MembersLetOthersWaitForOneThatMayComeBack) {
  under_way_.clear();
  for (const size_t dead : {0U, 4U}) carryOut(3, cores_[3].lose(idOf(dead), Loss::kDead));
  carryOut(3, cores_[3].lose(idOf(2), Loss::kFrozen));
  carryOut(3, cores_[3].receive(idOf(1), withoutSecret(cores_[0].view())));
  carryOut(3, cores_[3].want(1));
  EXPECT_FALSE(hopeless_);
  carryOut(3, cores_[3].lose(idOf(2), Loss::kDead));
  EXPECT_TRUE(hopeless_);
}

// What comes from it under the id of a newcomer of the view may come from anybody of the job.
TEST_F(LeftOut, MembersTellNoNewcomerTheSecret) {
  View view = cores_[0].view();
  view.number = 3;
  const auto member = idOf(7);
  view.members = {view.members[0], {member, 3, {}}};
  view.voters = view.decided_by = {idOf(0)};
  view.old_size = 3;
  view.outcomes.clear();
  view.seal = sealOf(view, cores_[0].view().secret);
  ElasticCore left({idOf(3), 1, {}}, ElasticRules{}, cores_[0].view());
  ElasticMessage told = withoutSecret(view);
  told.view = view;  // one that it has accepted
  left.receive(idOf(0), told);
  ASSERT_EQ(left.state(), ElasticCore::State::kLeftOut);
  ElasticMessage question;
  question.kind = ElasticKind::kBehind;
  question.lineage = view.lineage;
  question.number = 2;
  for (const auto& [asking, knows] : {std::pair(idOf(0), true), std::pair(member, false)}) {
    const ElasticEffects answer = left.receive(asking, question);
    ASSERT_EQ(answer.sends.size(), 1U);
    EXPECT_EQ(!answer.sends[0].message->view->secret.isZero(), knows);
  }
}

// What was said may be lost with the connection.
TEST_F(LeftOut, MembersAreToldAgainOnANewConnectionAndTellAgainOnOne) {
  const auto toldBy = [&](size_t from, size_t to) {
    const std::vector<ElasticEnvelope> sends = cores_[from].connected(idOf(to)).sends;
    const bool is_view = sends.size() == 1 && sends[0].message->kind == ElasticKind::kView;
    EXPECT_TRUE(is_view && sends[0].to == idOf(to));
    return is_view ? *sends[0].message->view : View();
  };
  View told = toldBy(0, 1);
  EXPECT_EQ(told.number, 2U);
  EXPECT_TRUE(told.secret.isZero());
  told = toldBy(1, 3);
  EXPECT_EQ(told, cores_[0].view());  // with the secret
}

TEST_F(LeftOut, MembersAskWhereTheConnectionFromOneHasEnded) {
  const ElasticEffects effects = cores_[3].disconnected(idOf(0));
  ASSERT_EQ(effects.sends.size(), 1U);
  const ElasticEffects answer = cores_[0].receive(idOf(3), *effects.sends[0].message);
  ASSERT_EQ(answer.sends.size(), 1U);
  EXPECT_EQ(*answer.sends[0].message->view, cores_[0].view());
  cores_[3].lose(idOf(0), Loss::kDead);
  EXPECT_TRUE(cores_[3].disconnected(idOf(0)).sends.empty());
}

TEST_F(LeftOut, NobodyWhoWaitsIsToldTheViewOnANewConnection) {
  ElasticMessage question;
  question.kind = ElasticKind::kJoin;
  question.members = {{idOf(7), 0, {}}};
  cores_[0].receive(idOf(7), question);
  EXPECT_TRUE(cores_[0].connected(idOf(7)).sends.empty());
}

// It is not believed, and true or not, it will not promise any more.
TEST_F(LeftOut, NobodyWaitsForOneThatCameWithTheViewAndTellsALaterOne) {
  View own = cores_[0].view();
  own.members = {own.members[0], {idOf(5), 2, {}}, {idOf(6), 2, {}}};
  ElasticCore member(own.members[2], ElasticRules{}, own);
  member.setReady(true);
  View later = own;
  later.number = 4;
  later.members.pop_back();
  EXPECT_FALSE(member.receive(idOf(5), withoutSecret(later)).refused.empty());
  EXPECT_EQ(member.view(), own);
  EXPECT_EQ(member.losses().at(idOf(5)), Loss::kAhead);
}

// Whoever tells it is a member of old, and the newcomer that stands there anew is the same one.
TEST_F(LeftOut, MembersBelieveAViewThatANewcomerOfTheirsHasComeIntoAgain) {
  View own = cores_[0].view();
  own.members = {own.members[0], own.members[1], {idOf(5), 2, {}}};
  ElasticCore member(own.members[1], ElasticRules{}, own);
  View later = own;
  later.number = 4;
  later.members = {own.members[0], {idOf(5), 4, {}}};
  later.voters = later.decided_by = {idOf(0)};
  EXPECT_TRUE(member.receive(idOf(0), withoutSecret(later)).left_out);
}

// It cannot check the seal of that view, so it must not pass it on: it has no more to say.
TEST_F(LeftOut, MemberThatHasMissedAViewHearsAndTellsNothingAnyMore) {
  View view = cores_[0].view();
  view.number = 3;
  view.members = {view.members[0]};
  view.voters = view.decided_by = {idOf(0)};
  view.old_size = 3;
  view.outcomes.clear();
  ASSERT_FALSE(cores_[3].isIsolated());
  const ElasticEffects effects = cores_[3].receive(idOf(0), withoutSecret(view));
  EXPECT_TRUE(effects.left_out);
  EXPECT_TRUE(effects.sends.empty());
  EXPECT_TRUE(cores_[3].isIsolated());
  ElasticMessage question;
  question.kind = ElasticKind::kBehind;
  question.lineage = view.lineage;
  question.number = 1;
  EXPECT_TRUE(cores_[3].receive(idOf(4), question).sends.empty());
}

// Three members, of which the first leaves, or all do, and it decides on the view that newcomers
// come into.
class Leaving : public ElasticCores {
 protected:
  void leave(size_t count, size_t newcomers = 1) {
    make(firstView(kNewcomer), ElasticRules{}, newcomers);
    for (size_t i = 0; i < count; ++i) cores_[i].setLeaving();
    for (size_t i = kNewcomer; i < cores_.size(); ++i) run(i, cores_[i].retry());
    run(0, cores_[0].want(1));
  }

  void run(size_t from, const ElasticEffects& effects) {
    carryOut(from, effects);
    deliver();
  }
  void carryOut(size_t from, const ElasticEffects& effects) override {
    ElasticCores::carryOut(from, effects);
    std::erase_if(under_way_, [&](const Message& one) {
      const bool tells_newcomer = one.to >= kNewcomer && one.words->kind == ElasticKind::kView;
      if (tells_newcomer && one.to == kNewcomer) told_.push_back(one);
      return tells_newcomer;
    });
  }

  static constexpr size_t kNewcomer = 3;  // the first one
  std::vector<Message> told_;             // to it, and not heard yet
};

TEST_F(Leaving, MemberDoesNotTellANewcomerTheSecretTheFirstThatStaysDoes) {
  leave(1);
  ASSERT_EQ(cores_[1].state(), ElasticCore::State::kActive);
  ASSERT_TRUE(cores_[1].view().has(idOf(kNewcomer)));
  size_t with_secret = 0;
  for (const auto& [from, to, words] : told_) {
    EXPECT_EQ(words->view->secret.isZero(), from != 1) << from;
    with_secret += words->view->secret.isZero() ? 0 : 1;
    cores_[kNewcomer].receive(idOf(from), *words);
  }
  EXPECT_EQ(with_secret, 1U);
  EXPECT_EQ(told_.size(), 1U);
  EXPECT_EQ(cores_[kNewcomer].view(), cores_[1].view());
}

TEST_F(Leaving, MembersHandOverToANewcomerWhereNoneOfThemStays) {
  leave(3);
  ASSERT_FALSE(told_.empty());
  for (const auto& [from, to, words] : told_) cores_[kNewcomer].receive(idOf(from), *words);
  EXPECT_EQ(cores_[kNewcomer].state(), ElasticCore::State::kActive);
  EXPECT_EQ(cores_[kNewcomer].view().members.size(), 1U);
  EXPECT_FALSE(cores_[kNewcomer].view().secret.isZero());
}

// Whatever is lost on its way to the newcomer, and whoever of them has ended since.
TEST_F(Leaving, MembersHandOverAgainToANewcomerThatAsksThem) {
  leave(3);
  std::vector<std::shared_ptr<const ElasticMessage>> answers;
  for (size_t member = 0; member < kNewcomer; ++member) {
    told_.clear();  // it has heard nothing
    ElasticMessage question;
    question.kind = ElasticKind::kJoin;
    question.members = {cores_[kNewcomer].self()};
    run(member, cores_[member].receive(idOf(kNewcomer), question));
    const bool knows = !cores_[member].view().secret.isZero();  // it has accepted the view
    ASSERT_EQ(told_.size(), knows ? 1U : 0U) << member;
    if (knows) answers.push_back(told_[0].words);
  }
  ASSERT_GE(answers.size(), 2U);
  cores_[kNewcomer].receive(idOf(1), *answers[1]);
  EXPECT_EQ(cores_[kNewcomer].state(), ElasticCore::State::kActive);
  EXPECT_FALSE(cores_[kNewcomer].view().secret.isZero());
}

TEST_F(Leaving, MembersHandOverToNobodyElseUnderTheIdOfANewcomer) {
  leave(3);
  told_.clear();
  ElasticMessage question;
  question.kind = ElasticKind::kJoin;
  question.members = {{idOf(kNewcomer), 0, "another address"}};
  EXPECT_TRUE(cores_[0].receive(idOf(kNewcomer), question).sends.empty());
}

// They may all have ended when they have told one of them.
TEST_F(Leaving, ANewcomerTellsAnotherOneWhereNoneOfTheMembersStays) {
  leave(3, 2);
  ASSERT_FALSE(told_.empty());
  const ElasticEffects effects = cores_[kNewcomer].receive(idOf(told_[0].from), *told_[0].words);
  ElasticCore& other = cores_[kNewcomer + 1];
  for (const auto& [to, words] : effects.sends) {
    if (to == idOf(kNewcomer + 1)) other.receive(idOf(kNewcomer), *words);
  }
  EXPECT_EQ(other.state(), ElasticCore::State::kActive);
  EXPECT_EQ(other.view(), cores_[kNewcomer].view());
  EXPECT_FALSE(other.view().secret.isZero());
}

// Another one has followed it without the newcomer, which has to be taken in by those in that one.
TEST_F(Leaving, ANewcomerTakesNoViewThatIsOverByNow) {
  leave(3, 2);
  ASSERT_FALSE(told_.empty());
  const auto& [from, to, handed_over] = told_[0];
  ElasticMessage next = *handed_over;
  next.view->number = next.number = handed_over->view->number + 1;
  next.view->members = {{idOf(kNewcomer + 1), handed_over->view->number, {}}};
  next.view->voters = next.view->decided_by = {idOf(kNewcomer + 1)};
  cores_[kNewcomer].receive(idOf(kNewcomer + 1), next);
  cores_[kNewcomer].receive(idOf(from), *handed_over);
  EXPECT_EQ(cores_[kNewcomer].state(), ElasticCore::State::kJoining);
  EXPECT_EQ(cores_[kNewcomer].unheard(), std::vector<MemberId>{idOf(kNewcomer + 1)});
  next.view->members.push_back({idOf(kNewcomer), ++next.view->number, {}});
  cores_[kNewcomer].receive(idOf(kNewcomer + 1), next);
  EXPECT_EQ(cores_[kNewcomer].state(), ElasticCore::State::kActive);
}

// One that stays tells it: a newcomer that takes part elsewhere by now is found out then.
TEST_F(Leaving, MemberDoesNotHandOverWhereAnotherStays) {
  leave(1);
  told_.clear();
  run(kNewcomer, cores_[kNewcomer].retry());
  for (const auto& [from, to, words] : told_) EXPECT_NE(from, 0U);
  EXPECT_EQ(told_.size(), 2U);
}

// The newcomer, as somebody who goes on alone in another lineage has taken it in.
ElasticCore takenInElsewhere(const Member& newcomer, const View& view) {
  View other = view;
  other.lineage.bytes[0] = 2;
  return {{newcomer.id, 2, {}}, ElasticRules{}, other};
}

TEST_F(Leaving, TheFirstThatStaysLearnsThatTheNewcomerTakesPartElsewhere) {
  leave(1);
  ElasticCore elsewhere = takenInElsewhere(cores_[kNewcomer].self(), cores_[1].view());
  for (const Message& told : told_) {
    for (const auto& [to, answer] : elsewhere.receive(idOf(told.from), *told.words).sends) {
      if (to == idOf(1)) run(1, cores_[1].receive(idOf(kNewcomer), *answer));
    }
  }
  EXPECT_EQ(cores_[1].losses().at(idOf(kNewcomer)), Loss::kParted);
}

// Its word that it does may be lost with the connection.
TEST_F(Leaving, WhoeverStaysLearnsThatOnANewConnectionToo) {
  leave(1);
  ElasticCore elsewhere = takenInElsewhere(cores_[kNewcomer].self(), cores_[2].view());
  for (const auto& [to, words] : cores_[2].connected(idOf(kNewcomer)).sends) {
    for (const auto& [asker, answer] : elsewhere.receive(idOf(2), *words).sends) {
      run(2, cores_[2].receive(idOf(kNewcomer), *answer));
    }
  }
  EXPECT_EQ(cores_[2].losses().at(idOf(kNewcomer)), Loss::kParted);
}

// What may be lost with a connection is that member's word that it has parted.
TEST_F(Leaving, AMemberThatTellsAViewOfAnotherLineageHasParted) {
  leave(1);
  const ElasticCore elsewhere = takenInElsewhere(cores_[kNewcomer].self(), cores_[1].view());
  cores_[1].receive(idOf(kNewcomer), withoutSecret(elsewhere.view()));
  EXPECT_EQ(cores_[1].losses().at(idOf(kNewcomer)), Loss::kParted);
}

}  // namespace
}  // namespace torchft_ext

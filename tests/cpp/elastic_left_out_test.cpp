// Who is left out of a view goes on telling others of it: the members that decided on it may be
// dead by then.
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "elastic_cores.h"

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

// It cannot check the seal of that view, so it must not pass it on: it has no more to say.
TEST_F(LeftOut, MemberThatHasMissedAViewHearsAndTellsNothingAnyMore) {
  View view = cores_[0].view();
  view.number = 3;
  view.members = {view.members[0]};
  view.voters = view.decided_by = {idOf(0)};
  view.old_size = 3;
  view.outcomes.clear();
  ASSERT_FALSE(cores_[3].isMute());
  const ElasticEffects effects = cores_[3].receive(idOf(0), withoutSecret(view));
  EXPECT_TRUE(effects.left_out);
  EXPECT_TRUE(effects.sends.empty());
  EXPECT_TRUE(cores_[3].isMute());
  ElasticMessage question;
  question.kind = ElasticKind::kBehind;
  question.lineage = view.lineage;
  question.number = 1;
  EXPECT_TRUE(cores_[3].receive(idOf(4), question).sends.empty());
}

// Three members, of which the first leaves, or all do, and it decides on the view that a newcomer
// comes into.
class Leaving : public ElasticCores {
 protected:
  void leave(size_t count) {
    make(firstView(kNewcomer), ElasticRules{}, /*newcomers=*/1);
    for (size_t i = 0; i < count; ++i) cores_[i].setLeaving();
    run(kNewcomer, cores_[kNewcomer].retry());
    run(0, cores_[0].want(1));
  }

  void run(size_t from, const ElasticEffects& effects) {
    carryOut(from, effects);
    deliver();
  }
  void carryOut(size_t from, const ElasticEffects& effects) override {
    ElasticCores::carryOut(from, effects);
    std::erase_if(under_way_, [&](const Message& one) {
      const bool tells_newcomer = one.to == kNewcomer && one.words->kind == ElasticKind::kView;
      if (tells_newcomer) told_.push_back(one);
      return tells_newcomer;
    });
  }

  static constexpr size_t kNewcomer = 3;
  std::vector<Message> told_;  // the newcomer, which has not heard it
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

// One that stays tells it: a newcomer that takes part elsewhere by now is found out then.
TEST_F(Leaving, MemberDoesNotHandOverWhereAnotherStays) {
  leave(1);
  told_.clear();
  run(kNewcomer, cores_[kNewcomer].retry());
  for (const auto& [from, to, words] : told_) EXPECT_NE(from, 0U);
  EXPECT_EQ(told_.size(), 2U);
}

TEST_F(Leaving, TheFirstThatStaysLearnsThatTheNewcomerTakesPartElsewhere) {
  leave(1);
  View other = cores_[1].view();
  other.lineage.bytes[0] = 2;
  ElasticCore elsewhere({idOf(kNewcomer), 2, {}}, ElasticRules{}, other);
  for (const Message& told : told_) {
    for (const auto& [to, answer] : elsewhere.receive(idOf(told.from), *told.words).sends) {
      if (to == idOf(1)) run(1, cores_[1].receive(idOf(kNewcomer), *answer));
    }
  }
  EXPECT_EQ(cores_[1].losses().at(idOf(kNewcomer)), Loss::kParted);
}

}  // namespace
}  // namespace torchft_ext

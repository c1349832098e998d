// What members do not believe of views and newcomers.
#include "elastic/view_check.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "elastic/elastic_core.h"

namespace torchft_ext {
namespace {

MemberId idOf(uint8_t number) {
  MemberId id;
  id.bytes[0] = number;
  return id;
}

Member memberOf(uint8_t number, uint64_t since) {
  return {idOf(number), since, "record " + std::to_string(number)};
}

View known() {
  View view;
  view.lineage.bytes[0] = 1;
  view.number = 4;
  setSecret(view, ViewSecret::random());
  view.members = {memberOf(1, 1), memberOf(2, 1), memberOf(3, 3)};
  view.voters = {idOf(1), idOf(2), idOf(3)};
  return view;
}

// Without member 2, and with a newcomer.
View nextOf(const View& view) {
  View next = view;
  next.number = view.number + 1;
  setSecret(next, ViewSecret::random());
  next.members = {view.members[0], view.members[2], memberOf(4, next.number)};
  next.voters = {idOf(1), idOf(3)};
  next.decided_by = {idOf(1), idOf(3)};
  next.old_size = 3;
  next.outcomes = {{view.number, 1, {}}, {view.number, 2, {}}};
  next.seal = sealOf(next, view.secret);
  return next;
}

class ForgedView : public testing::Test {
 protected:
  // What speaks against the next view where this is done to it, by somebody who can seal it.
  std::string objectionAfter(const std::function<void(View&)>& change) const {
    View view = nextOf(known_);
    change(view);
    view.seal = sealOf(view, known_.secret);
    return objectionToSuccessor(view, known_, idOf(1));
  }

  const View known_ = known();
};

TEST_F(ForgedView, IsToldFromARightOne) {
  EXPECT_EQ(objectionToSuccessor(nextOf(known_), known_, idOf(1)), "");
  EXPECT_EQ(objectionToSuccessor(nextOf(known_), known_, idOf(4)), "");  // whoever tells of it
  EXPECT_EQ(objectionAfter([](View&) {}), "");
}

TEST_F(ForgedView, IsRefusedWhereItsPartsDoNotFit) {
  const std::vector<std::pair<std::string, std::function<void(View&)>>> cases = {
      {"of no job", [](View& view) { view.lineage = {}; }},
      {"voters are not of its members", [](View& view) { view.members.clear(); }},
      {"a member twice", [](View& view) { view.members.push_back(view.members[0]); }},
      {"a member from later", [](View& view) { view.members[2].since = 6; }},
      {"a member from later", [](View& view) { view.members[2].since = 0; }},
      {"voters are not of its members", [](View& view) { view.voters.push_back(idOf(2)); }},
      {"voters are not of its members", [](View& view) { view.voters.clear(); }},
      {"voters are not of its members", [](View& view) { view.voters.push_back(idOf(1)); }},
      {"decided on it twice", [](View& view) { view.decided_by.push_back(idOf(1)); }},
      {"other agreements", [](View& view) { view.outcomes[0].view = 3; }},
      {"other agreements", [](View& view) { view.outcomes[1].index = 1; }},
  };
  for (const auto& [why, change] : cases) {
    EXPECT_NE(objectionAfter(change).find(why), std::string::npos) << why;
  }
}

TEST_F(ForgedView, IsRefusedWhereItDoesNotFollowTheOneThatIsKnown) {
  const std::vector<std::pair<std::string, std::function<void(View&)>>> cases = {
      {"no later one",
       [](View& view) { view.number = 4, view.outcomes.clear(), view.members.pop_back(); }},
      {"members are not those", [](View& view) { view.members[0].record = "elsewhere"; }},
      {"members are not those", [](View& view) { view.members[2].since = 2; }},  // never seen
      {"members are not those", [](View& view) { view.members[1].since = 5; }},  // an old one
      {"members are not those", [](View& view) { std::swap(view.members[0], view.members[1]); }},
      {"a newcomer votes",
       [](View& view) {
         view.voters = {idOf(1), idOf(4)};
       }},
      {"a stranger decided", [](View& view) { view.decided_by.push_back(idOf(7)); }},
      {"another view was before", [](View& view) { view.old_size = 2; }},
  };
  for (const auto& [why, change] : cases) {
    EXPECT_NE(objectionAfter(change).find(why), std::string::npos)
        << why << ", found: " << objectionAfter(change);
  }
}

TEST_F(ForgedView, IsRefusedFromWhoDoesNotKnowTheSecretOfTheViewBefore) {
  View view = nextOf(known_);
  view.seal = sealOf(view, ViewSecret::random());
  EXPECT_NE(objectionToSuccessor(view, known_, idOf(1)), "");
  view = nextOf(known_);
  view.members.pop_back();  // after it was sealed
  EXPECT_NE(objectionToSuccessor(view, known_, idOf(1)), "");
}

// Who has been left out has seen it sealed, and is told it without its secret.
TEST_F(ForgedView, IsRefusedWithASecretOfTheTellersOwn) {
  View view = nextOf(known_);
  view.secret = ViewSecret::random();
  EXPECT_EQ(objectionToSuccessor(view, known_, idOf(1)), "its secret is another one");
  setSecret(view, view.secret);
  EXPECT_NE(objectionToSuccessor(view, known_, idOf(1)).find("has sealed it"), std::string::npos);
}

TEST_F(ForgedView, MayHaveAllMembersAsVotersWhereAllVotersLeft) {
  EXPECT_EQ(objectionAfter([](View& view) {
              view.members = {memberOf(4, 5)};
              view.voters = {idOf(4)};
            }),
            "");
}

TEST_F(ForgedView, MayHaveNobodyWhereAllLeft) {
  EXPECT_EQ(objectionAfter([](View& view) { view.members.clear(), view.voters.clear(); }), "");
}

TEST_F(ForgedView, IsBelievedOfAMemberAloneByWhoHasMissedOne) {
  View later = nextOf(nextOf(known_));
  later.members = {known_.members[0], memberOf(5, 6)};
  later.voters = {idOf(1)};
  EXPECT_EQ(objectionToSuccessor(later, known_, idOf(1)), "");
  EXPECT_NE(objectionToSuccessor(later, known_, idOf(5)), "");
  later.members[0].record = "elsewhere";
  EXPECT_NE(objectionToSuccessor(later, known_, idOf(1)), "");
}

// On its connection the job's secret was enough.
TEST_F(ForgedView, IsNotBelievedOfWhoCameWithTheViewBySomebodyWhoHasMissedOne) {
  View view = nextOf(known_);
  View later = nextOf(nextOf(view));
  later.members = {view.members[0]};
  later.voters = {idOf(1)};
  EXPECT_EQ(objectionToSuccessor(later, view, idOf(3)), "");
  EXPECT_NE(objectionToSuccessor(later, view, idOf(4)), "");
  view.number = 1;  // its members are all that there are
  for (Member& member : view.members) member.since = 1;
  later.members = {view.members[0]};
  EXPECT_EQ(objectionToSuccessor(later, view, idOf(4)), "");
}

TEST(ForgedNewcomer, AsksForItselfAndWhereItHasProvedToBe) {
  const Member proved = memberOf(7, 0);
  EXPECT_EQ(objectionToNewcomer(proved, proved), "");
  Member other = proved;
  other.record = "elsewhere";
  EXPECT_NE(objectionToNewcomer(other, proved), "");
  EXPECT_NE(objectionToNewcomer(memberOf(8, 0), proved), "");
  EXPECT_NE(objectionToNewcomer(proved, Member()), "");  // nobody is known under its id
}

// A member as a whole.

ElasticMessage viewMessage(const View& view) {
  ElasticMessage message;
  message.kind = ElasticKind::kView;
  message.lineage = view.lineage;
  message.number = view.number;
  message.view = view;
  return message;
}

TEST(ForgedMessages, ChangeNothingAndSayWhy) {
  const View view = known();
  ElasticCore core(view.members[0], {}, view);
  View forged = nextOf(view);
  forged.members = {memberOf(9, 5)};
  forged.voters = {idOf(9)};
  const ElasticEffects told = core.receive(idOf(9), viewMessage(forged));
  EXPECT_EQ(told.refused, "view 5: no member of the view before has sealed it");
  EXPECT_FALSE(told.new_view || told.left_out || told.stopped);
  EXPECT_EQ(core.view(), view);

  ElasticMessage accept = viewMessage(forged);
  accept.kind = ElasticKind::kAccept;
  accept.number = view.number;
  accept.ballot = {1, idOf(2)};
  EXPECT_NE(core.receive(idOf(2), accept).refused, "");
  EXPECT_FALSE(core.accepted());

  EXPECT_TRUE(core.receive(idOf(9), viewMessage(nextOf(view))).new_view);  // whoever passes it on
}

TEST(ForgedMessages, GiveNoMemberAnotherSecret) {
  const View view = known();
  View forged = nextOf(view);
  forged.secret = ViewSecret::random();
  ElasticCore member(view.members[0], {}, view);
  EXPECT_NE(member.receive(idOf(3), viewMessage(forged)).refused, "");
  EXPECT_EQ(member.view(), view);
  const Member joining = memberOf(4, 0);
  ElasticCore newcomer(joining, {}, std::vector<MemberId>{idOf(1)});
  EXPECT_NE(newcomer.receive(idOf(1), viewMessage(forged)).refused, "");
}

TEST(ForgedMessages, OfAViewThatListsAMemberWithoutTheSecretChangeNothing) {
  const View view = known();
  View bare = nextOf(view);
  bare.secret = {};  // the seal is not about it
  ElasticCore member(view.members[0], {}, view);
  EXPECT_NE(member.receive(idOf(3), viewMessage(bare)).refused.find("secret"), std::string::npos);
  EXPECT_EQ(member.view(), view);
  ElasticCore left_out(view.members[1], {}, view);  // it is told so without
  EXPECT_TRUE(left_out.receive(idOf(3), viewMessage(bare)).left_out);
}

// Whoever takes it up as the binding value has to tell its members the secret.
TEST(ForgedMessages, OfAValueWithoutItsSecretAreNotAccepted) {
  const View view = known();
  ElasticMessage accept = viewMessage(nextOf(view));
  accept.kind = ElasticKind::kAccept;
  accept.number = view.number;
  accept.ballot = {1, idOf(1)};
  ElasticMessage bare = accept;
  bare.view->secret = {};
  ElasticCore left_out(view.members[1], {}, view);
  EXPECT_NE(left_out.receive(idOf(1), bare).refused.find("secret"), std::string::npos);
  EXPECT_FALSE(left_out.accepted());
  EXPECT_EQ(left_out.receive(idOf(1), accept).refused, "");
  EXPECT_TRUE(left_out.accepted());
}

// Who is left out tells others of the view that says so; not where it could not check the seal.
TEST(ForgedMessages, AreNotPassedOnByWhoIsLeftOut) {
  const View view = known();
  const View next = nextOf(view);
  View later = next;
  ++later.number;
  later.members.pop_back();
  for (Outcome& outcome : later.outcomes) ++outcome.view;
  ElasticMessage behind;
  behind.kind = ElasticKind::kBehind;
  behind.lineage = view.lineage;
  behind.number = view.number;
  for (const View& told : {next, later}) {
    ElasticCore core(view.members[1], {}, view);
    EXPECT_TRUE(core.receive(idOf(1), viewMessage(told)).left_out);
    EXPECT_EQ(core.receive(idOf(1), behind).sends.empty(), told == later);
  }
}

// No seal can be checked of a later view, so as an accepted value it may not bind the proposer.
TEST(ForgedMessages, OfAnAcceptedValueThatIsNotTheNextOneBindNobody) {
  const View view = known();
  View later = nextOf(nextOf(view));
  View elsewhere = nextOf(view);
  elsewhere.lineage.bytes[0] = 2;
  for (const View& forged : {later, elsewhere}) {
    ElasticCore core(view.members[0], {}, view);
    core.want(view.number);
    ElasticMessage promise;
    promise.kind = ElasticKind::kPromise;
    promise.lineage = view.lineage;
    promise.number = view.number;
    promise.ballot = {1, idOf(1)};
    core.receive(idOf(3), promise);
    promise.promise.accepted = AcceptedView{{100, idOf(2)}, forged};
    const ElasticEffects effects = core.receive(idOf(2), promise);
    EXPECT_NE(effects.refused.find("not the next one"), std::string::npos) << effects.refused;
    EXPECT_TRUE(effects.sends.empty());
    EXPECT_EQ(core.view(), view);
  }
}

TEST(ForgedMessages, OfAValueThatAStoreHoldsAreNoVote) {
  View view = known();
  view.members.pop_back();  // two, of which one is lost
  view.voters.pop_back();
  view.witness = WitnessId::random();
  ElasticCore core(view.members[0], {}, view);
  core.lose(idOf(2), Loss::kDead);
  const ElasticEffects asked = core.want(view.number);
  ASSERT_TRUE(asked.witness);
  WitnessReply reply;
  reply.what = asked.witness->what;
  reply.lineage = asked.witness->lineage;
  reply.number = asked.witness->number;
  reply.ballot = asked.witness->ballot;
  reply.has_vote = true;
  reply.held = AcceptedView{{1, idOf(2)}, nextOf(known())};  // of another view before
  const ElasticEffects effects = core.witnessAnswered(reply);
  EXPECT_NE(effects.refused, "");
  EXPECT_FALSE(effects.no_quorum.empty());
  EXPECT_FALSE(effects.witness);
}

TEST(ForgedMessages, OfPairsThatNobodySaysAreNotRead) {
  ElasticMessage message;
  message.kind = ElasticKind::kCompleted;
  message.lineage.bytes[0] = 1;
  const auto pair = [](uint8_t i) { return MemberPair{idOf(0), idOf(i + 1)}; };
  for (uint8_t i = 0; i < 64; ++i) message.cut.insert(pair(i));
  EXPECT_TRUE(decodeElasticMessage(encodeElasticMessage(message)));
  message.cut.insert(pair(64));
  EXPECT_FALSE(decodeElasticMessage(encodeElasticMessage(message)));
  for (const uint8_t lower : {1, 2}) {  // the lower id comes first
    message.cut = {{idOf(2), idOf(lower)}};
    EXPECT_FALSE(decodeElasticMessage(encodeElasticMessage(message))) << lower;
  }
}

}  // namespace
}  // namespace torchft_ext

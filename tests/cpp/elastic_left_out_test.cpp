// Who is left out of a view goes on telling others of it: the members that decided on it may be
// dead by then.
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "elastic/elastic_core.h"
#include "elastic/view_check.h"

namespace torchft_ext {
namespace {

MemberId idOf(size_t i) {
  MemberId id;
  id.bytes[0] = static_cast<uint8_t>(i + 1);
  return id;
}

// Five members, of which the first has a view decided that is without the two after it. These two
// have accepted it, and the last two have not.
class LeftOut : public testing::Test {
 protected:
  struct Message {
    size_t from;
    size_t to;
    std::shared_ptr<const ElasticMessage> words;
  };

  LeftOut() {
    View view;
    view.lineage.bytes[0] = 1;
    view.number = 1;
    setSecret(view, ViewSecret::random());
    for (size_t i = 0; i < 5; ++i) {
      view.members.push_back({idOf(i), 1, {}});
      view.voters.push_back(idOf(i));
    }
    for (const Member& member : view.members) {
      cores_.emplace_back(member, ElasticRules{}, view);
      cores_.back().setSeed(ViewSecret::random());
      cores_.back().setReady(member.id != idOf(1) && member.id != idOf(2));
    }
    cores_[0].leaveOut({idOf(1), idOf(2)});
    carryOut(0, cores_[0].want(1));
    deliver(
        [](const Message& one) { return one.to < 3 || one.words->kind == ElasticKind::kPrepare; });
    EXPECT_EQ(cores_[0].view().number, 2U);
    EXPECT_EQ(cores_[0].view().members.size(), 3U);
    for (const size_t i : {3U, 4U}) EXPECT_EQ(cores_[i].view().number, 1U);
  }

  void carryOut(size_t from, const ElasticEffects& effects) {
    for (const auto& [to, words] : effects.sends) {
      under_way_.push_back({from, static_cast<size_t>(to.bytes[0] - 1), words});
    }
  }
  // What may arrive does; the rest waits.
  void deliver(const std::function<bool(const Message&)>& mayArrive) {
    std::deque<Message> kept;
    while (!under_way_.empty()) {
      const Message one = under_way_.front();
      under_way_.pop_front();
      if (mayArrive(one)) {
        carryOut(one.to, cores_[one.to].receive(idOf(one.from), *one.words));
      } else {
        kept.push_back(one);
      }
    }
    under_way_ = kept;
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

  std::vector<ElasticCore> cores_;
  std::deque<Message> under_way_;
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

// Nobody but its members is told the secret, so who has not accepted it does not know it either.
TEST_F(LeftOut, MembersAreNotBelievedWhereTheyTellAMemberNoSecret) {
  ElasticMessage told;
  told.kind = ElasticKind::kView;
  told.lineage = cores_[0].view().lineage;
  told.number = 2;
  told.view = cores_[0].view();
  told.view->secret = {};
  EXPECT_NE(cores_[3].receive(idOf(1), told).refused, "");
  EXPECT_EQ(cores_[3].view().number, 1U);
}

}  // namespace
}  // namespace torchft_ext

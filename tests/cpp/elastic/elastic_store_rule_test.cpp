// What the store decides: by its register of a lineage, for members of the protocol's core.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cpp/elastic/elastic_cores.h"
#include "cpp/membership/memory_store.h"
#include "elastic/job_store.h"

namespace torchft_ext {
namespace {

using namespace elastic_test;  // NOLINT(google-build-using-namespace)

// Three members by the store's rule, and a newcomer. Words between them and the store's answers
// arrive when a test says so.
class StoreRule : public ElasticCores {
 protected:
  StoreRule() {
    rules_.store_rule = true;
    rules_.min_size = 2;
    Founding founding;
    founding.rules = rules_;
    founding.view = firstView(kNewcomer);
    founding.view.lineage = Lineage::random();
    founding_ = store().found(founding);
    make(founding_.view, rules_, /*newcomers=*/1);
    requests_.resize(cores_.size());
  }

  JobStore store() { return {memory_->comparing("member"), "job/"}; }

  void carryOut(size_t from, const ElasticEffects& effects) override {
    ElasticCores::carryOut(from, effects);
    if (effects.witness) requests_[from] = effects.witness;
  }
  void letStoreAnswer(size_t i) {
    ASSERT_TRUE(requests_[i]);
    const WitnessRequest request = *std::exchange(requests_[i], {});
    WitnessReply reply;
    reply.what = request.what;
    reply.lineage = request.lineage;
    reply.number = request.number;
    reply.ballot = request.ballot;
    try {
      reply = store().ask(request);
    } catch (const StoreError&) {  // it has no vote
    }
    carryOut(i, cores_[i].witnessAnswered(reply));
  }
  // As the driver of a first member does.
  void look(size_t i) {
    const Lineage lineage = cores_[i].view().lineage;
    cores_[i].setWitness(lineage, store().restore(founding_, lineage, cores_[i].view().members));
  }
  void lose(size_t i, std::vector<size_t> lost) {
    for (const size_t id : lost) carryOut(i, cores_[i].lose(idOf(id), Loss::kDead));
    carryOut(i, cores_[i].want(cores_[i].view().number));
  }
  // The first two leave, and die when the store has decided so, before they have told the last.
  void haveItDecidedThatTheFirstTwoLeave() {
    for (const size_t i : {0U, 1U}) cores_[i].setLeaving();
    carryOut(0, cores_[0].want(1));
    deliver();
    letStoreAnswer(0);
    ASSERT_EQ(cores_[0].state(), ElasticCore::State::kLeftOut);
    under_way_.clear();
  }
  // The first member goes on alone, and the newcomer asks it for a place.
  void beginLineage() {
    lineage_.bytes[0] = 7;
    carryOut(0, cores_[0].beginLineage(lineage_));
    under_way_.clear();
    carryOut(kNewcomer, cores_[kNewcomer].retry());
    deliver();
  }
  void expectThatTheNewcomerIsIn(uint64_t number) {
    for (const size_t i : {size_t{0}, kNewcomer}) {
      EXPECT_EQ(cores_[i].state(), ElasticCore::State::kActive) << i;
      EXPECT_EQ(cores_[i].view().lineage, lineage_) << i;
      EXPECT_EQ(cores_[i].view().number, number) << i;
      EXPECT_EQ(cores_[i].view().members.size(), 2U) << i;
    }
  }

  static constexpr size_t kNewcomer = 3;
  const std::shared_ptr<MemoryStore> memory_ = std::make_shared<MemoryStore>();
  ElasticRules rules_;
  Founding founding_;
  Lineage lineage_;
  std::vector<std::optional<WitnessRequest>> requests_;
};

// min_size is 2; but what the store holds is decided, whoever is left to read it.
TEST_F(StoreRule, OneMemberThatIsLeftTakesWhatTheStoreHasDecided) {
  haveItDecidedThatTheFirstTwoLeave();
  lose(2, {0, 1});
  EXPECT_FALSE(hopeless_);
  letStoreAnswer(2);
  EXPECT_EQ(cores_[2].state(), ElasticCore::State::kActive);
  EXPECT_EQ(cores_[2].view().number, 2U);
  EXPECT_EQ(cores_[2].view().members.size(), 1U);
  EXPECT_FALSE(cores_[2].view().secret.isZero());
}

// Others have decided on two views without it, so it is in none from then on.
TEST_F(StoreRule, AMemberThatHasMissedAViewIsLeftOutWhereTheStoreSaysSo) {
  const auto decide = [&](size_t i, uint64_t newer_than) {
    carryOut(i, cores_[i].want(newer_than));
    std::erase_if(under_way_, [](const Message& one) { return one.to == 2; });
    deliver();
    letStoreAnswer(i);
    std::erase_if(under_way_, [](const Message& one) { return one.to == 2; });
    deliver();
  };
  for (const size_t i : {0U, 1U}) carryOut(i, cores_[i].lose(idOf(2), Loss::kFrozen));
  decide(0, 1);
  decide(0, 2);
  ASSERT_EQ(cores_[1].view().number, 3U);
  lose(2, {0, 1});
  letStoreAnswer(2);
  EXPECT_EQ(cores_[2].state(), ElasticCore::State::kLeftOut);
  EXPECT_TRUE(cores_[2].isIsolated());  // nobody can check that view's seal
}

TEST_F(StoreRule, TooFewMembersAreHopelessOnceTheStoreIsSeenToHaveDecidedNothing) {
  lose(2, {0, 1});
  EXPECT_EQ(no_quorum_, 1);
  EXPECT_FALSE(hopeless_);
  letStoreAnswer(2);
  EXPECT_EQ(no_quorum_, 2);
  EXPECT_TRUE(hopeless_);
}

TEST_F(StoreRule, MembersThatCannotReadTheStoreAreNotHopeless) {
  memory_->fail("gone");
  lose(2, {0, 1});
  letStoreAnswer(2);
  EXPECT_EQ(no_quorum_, 2);
  EXPECT_FALSE(hopeless_);
}

// Its first view names no store, so its member decides on the second, which names it.
TEST_F(StoreRule, AnOperatorsLineageTakesANewcomerInAndNamesTheStore) {
  beginLineage();
  look(0);
  carryOut(0, cores_[0].want(2));
  EXPECT_FALSE(requests_[0]);
  deliver();
  expectThatTheNewcomerIsIn(3);
  ASSERT_FALSE(cores_[0].view().witness.isZero());
  EXPECT_NE(cores_[0].view().witness, founding_.view.witness);
  carryOut(0, cores_[0].want(3));
  deliver();
  letStoreAnswer(0);
  EXPECT_TRUE(cores_[0].view().store_decided);
  deliver();
  expectThatTheNewcomerIsIn(4);
}

TEST_F(StoreRule, AnOperatorsLineageTakesANewcomerInWithoutTheStore) {
  memory_->fail("gone");
  beginLineage();
  carryOut(0, cores_[0].want(2));
  deliver();
  expectThatTheNewcomerIsIn(3);
  EXPECT_TRUE(cores_[0].view().witness.isZero());
}

// Its identity to another lineage would be that of another register.
TEST_F(StoreRule, AnOperatorsLineageDoesNotNameTheStoreByWhatItWasToTheFirst) {
  look(0);
  beginLineage();
  for (const uint64_t number : {2U, 3U}) {
    carryOut(0, cores_[0].want(number));
    deliver();
    expectThatTheNewcomerIsIn(number + 1);
    EXPECT_TRUE(cores_[0].view().witness.isZero());
    cores_[0].setWitness(founding_.view.lineage, founding_.view.witness);  // a late look
  }
}

TEST_F(StoreRule, TheFirstLineageIsDecidedAsBeforeWhereAMemberGoesOnAlone) {
  beginLineage();
  look(0);
  for (const uint64_t number : {2U, 3U}) {
    carryOut(0, cores_[0].want(number));
    deliver();
  }
  letStoreAnswer(0);
  deliver();
  expectThatTheNewcomerIsIn(4);
  carryOut(1, cores_[1].lose(idOf(0), Loss::kParted));
  carryOut(1, cores_[1].want(1));
  deliver();
  letStoreAnswer(1);
  deliver();
  for (const size_t i : {1U, 2U}) {
    EXPECT_EQ(cores_[i].view().lineage, founding_.view.lineage);
    EXPECT_EQ(cores_[i].view().number, 2U);
    EXPECT_TRUE(cores_[i].view().store_decided);
    EXPECT_FALSE(cores_[i].view().has(idOf(0)));
  }
}

// It has a register for each; in one that restarted empty neither has its own any more.
TEST_F(StoreRule, TheStoreIsAnotherOneToEachLineage) {
  Lineage other;
  other.bytes[0] = 9;
  const WitnessId to_other = store().restore(founding_, other, founding_.view.members);
  EXPECT_NE(to_other, founding_.view.witness);
  EXPECT_EQ(store().restore(founding_, other, {}), to_other);
  EXPECT_EQ(store().restore(founding_, founding_.view.lineage, {}), founding_.view.witness);
  memory_->clear();
  EXPECT_NE(store().restore(founding_, other, {}), to_other);
  EXPECT_NE(store().restore(founding_, founding_.view.lineage, {}), founding_.view.witness);
}

}  // namespace
}  // namespace torchft_ext

// Whole members of an elastic job, several in this process: over real connections and a store in
// memory.
#include "elastic/elastic_member.h"

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "elastic/member_network.h"
#include "memory_store.h"
#include "net_support.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)

constexpr std::chrono::seconds kLong{20};

struct Job {
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  std::vector<std::shared_ptr<ElasticMember>> members;
  int max_size = 100;
  bool store_rule = false;

  ElasticOptions options(int size) const {
    ElasticOptions options;
    options.rules.max_size = max_size;
    options.rules.store_rule = store_rule;
    options.job = "test";
    options.size = size;
    options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
    options.limit = std::chrono::seconds(2);
    options.store = store->comparing("member");
    options.prefix = "job/";
    return options;
  }

  std::shared_ptr<ElasticMember> join(int size) const {
    return ElasticMember::join(options(size), Deadline::after(kLong));
  }

  void found(int size, int at_most = 100) {
    max_size = at_most;
    std::vector<std::future<std::shared_ptr<ElasticMember>>> joining;
    joining.reserve(static_cast<size_t>(size));
    for (int i = 0; i < size; ++i) {
      joining.push_back(std::async(std::launch::async, [this, size] { return join(size); }));
    }
    for (auto& one : joining) members.push_back(one.get());
  }

  // Of every member that is there.
  std::vector<View> awaitViews(uint64_t newer_than) {
    std::vector<std::future<View>> waiting;
    for (const auto& member : members) {
      waiting.push_back(std::async(std::launch::async, [member, newer_than] {
        return member->awaitView(newer_than, Deadline::after(kLong));
      }));
    }
    std::vector<View> views;
    views.reserve(waiting.size());
    for (auto& one : waiting) views.push_back(one.get());
    return views;
  }

  std::vector<Answer> agree(uint64_t view, const std::vector<bool>& oks) {
    std::vector<std::future<Answer>> voting;
    for (size_t i = 0; i < members.size(); ++i) {
      voting.push_back(std::async(std::launch::async, [this, i, view, &oks] {
        Vote vote;
        vote.ok = oks[i];
        vote.note = "note " + std::to_string(i);
        return members[i]->agree(view, vote, Deadline::after(kLong));
      }));
    }
    std::vector<Answer> answers;
    answers.reserve(voting.size());
    for (auto& one : voting) answers.push_back(one.get());
    return answers;
  }
};

void expectOneView(const std::vector<View>& views, uint64_t number, size_t size) {
  for (const View& view : views) {
    EXPECT_EQ(view, views.front());
    EXPECT_EQ(view.number, number);
    EXPECT_EQ(view.members.size(), size);
  }
}

TEST(ElasticMember, AJobIsFoundedByAsManyAsWereAskedFor) {
  Job job;
  job.found(3);
  expectOneView(job.awaitViews(0), 1, 3);
}

TEST(ElasticMember, AllAgreeOrNobody) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  for (const Answer& answer : job.agree(1, {true, true, true})) {
    EXPECT_TRUE(answer.ok);
    EXPECT_EQ(answer.notes.size(), 3U);
  }
  for (const Answer& answer : job.agree(1, {true, false, true})) EXPECT_FALSE(answer.ok);
  for (const Answer& answer : job.agree(1, {true, true, true})) EXPECT_TRUE(answer.ok);
}

TEST(ElasticMember, ASecondThreadInAgreeIsToldSoAtOnce) {
  Job job;
  job.found(2);
  job.awaitViews(0);
  const auto agree = [&](size_t i) {
    Vote vote;
    vote.ok = true;
    try {
      return std::string(job.members[i]->agree(1, vote, Deadline::after(kLong)).ok ? "ok" : "no");
    } catch (const ElasticError& error) {
      return std::string(error.what());
    }
  };
  std::vector<std::future<std::string>> threads;
  for (int i = 0; i < 2; ++i) threads.push_back(std::async(std::launch::async, agree, 0));
  const auto isThere = [](const std::future<std::string>& one) {
    return one.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  while (!isThere(threads[0]) && !isThere(threads[1])) std::this_thread::yield();
  if (!isThere(threads[0])) std::swap(threads[0], threads[1]);
  const std::string told = threads[0].get();
  EXPECT_NE(told.find("another thread"), std::string::npos) << told;
  EXPECT_EQ(agree(1), "ok");
  EXPECT_EQ(threads[1].get(), "ok");
}

TEST(ElasticMember, GoesOnWithoutAMemberThatEnded) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  job.agree(1, {true, true, true});
  job.members.erase(job.members.begin());  // without a word
  expectOneView(job.awaitViews(1), 2, 2);
  for (const Answer& answer : job.agree(2, {true, true})) EXPECT_TRUE(answer.ok);
}

TEST(ElasticMember, AnAgreementEndsWithoutAMemberThatEnded) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  job.members.pop_back();
  for (const Answer& answer : job.agree(1, {true, true})) EXPECT_TRUE(answer.ok);
  expectOneView(job.awaitViews(1), 2, 2);
}

TEST(ElasticMember, HalfNeedsTheWitness) {
  Job job;
  job.found(2);
  job.awaitViews(0);
  job.members.pop_back();
  expectOneView(job.awaitViews(1), 2, 1);
}

TEST(ElasticMember, HalfWithoutTheWitnessIsNoQuorum) {
  Job job;
  job.found(2);
  job.awaitViews(0);
  job.store->fail("gone");
  job.members.pop_back();
  try {
    job.members.front()->awaitView(1, Deadline::after(std::chrono::seconds(1)));
    FAIL() << "expected no quorum";
  } catch (const ElasticError& error) {
    EXPECT_EQ(error.kind(), ElasticErrorKind::kNoQuorum);
    EXPECT_NE(std::string(error.what()).find("its process ended"), std::string::npos)
        << error.what();
  }
}

TEST(ElasticMember, TwoOfFourAtOnceGoOnWithTheWitness) {
  Job job;
  job.found(4);
  job.awaitViews(0);
  job.members.resize(2);
  expectOneView(job.awaitViews(1), 2, 2);
}

// It names them long before the deadline, since none of them can come back.
TEST(ElasticMember, ThreeOfFourThatEndedAreNoQuorumAtOnce) {
  Job job;
  job.found(4);
  job.awaitViews(0);
  job.members.resize(1);
  const auto began = std::chrono::steady_clock::now();
  try {
    job.members.front()->awaitView(1, Deadline::after(kLong));
    FAIL() << "expected no quorum";
  } catch (const ElasticError& error) {
    EXPECT_EQ(error.kind(), ElasticErrorKind::kNoQuorum);
    const std::string told = error.what();
    size_t named = 0;
    for (size_t at = 0; (at = told.find("its process ended", at)) != std::string::npos; ++at) {
      ++named;
    }
    EXPECT_EQ(named, 3U) << told;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, kLong / 2);
}

TEST(ElasticMember, OneOfFourGoesOnByTheStoresRule) {
  Job job;
  job.store_rule = true;
  job.found(4);
  job.awaitViews(0);
  job.members.resize(1);
  expectOneView(job.awaitViews(1), 2, 1);
}

TEST(ElasticMember, WhoTookInThreeThatEndBeforeACommitGoesOnAlone) {
  Job job;
  job.found(1);
  job.awaitViews(0);
  const auto first = job.members.front();
  std::vector<std::future<View>> places;
  for (int i = 0; i < 3; ++i) {
    job.members.push_back(job.join(1));
    places.push_back(std::async(std::launch::async, [newcomer = job.members.back()] {
      return newcomer->awaitView(0, Deadline::after(kLong));
    }));
  }
  while (first->waiting().size() < 3) std::this_thread::sleep_for(milliseconds(1));
  std::vector<View> views{first->awaitView(1, Deadline::after(kLong))};
  for (auto& place : places) views.push_back(place.get());
  expectOneView(views, 2, 4);
  EXPECT_EQ(views.front().voters.size(), 1U);
  job.members.resize(1);
  expectOneView(job.awaitViews(2), 3, 1);
}

// The first member looks at it twice a second.
TEST(ElasticMember, AStoreThatIsDownIsNoNewWitness) {
  Job job;
  job.found(2);
  job.awaitViews(0);
  job.store->fail("gone");
  const Deadline looked = Deadline::after(milliseconds(1200));
  while (!looked.expired()) {
    for (const Answer& answer : job.agree(1, {true, true})) EXPECT_FALSE(answer.new_witness);
  }
}

TEST(ElasticMember, TwoOfThreeGoOnWithoutTheStore) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  job.store->fail("gone");
  job.members.erase(job.members.begin());
  expectOneView(job.awaitViews(1), 2, 2);
}

// However early it looks: a view without it is none for it.
TEST(ElasticMember, WhoIsLeftOutGetsNoView) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  const auto absent = job.members.back();
  job.members.pop_back();
  absent->setReady(false);  // busy elsewhere
  StoreCall count;
  count.what = StoreCall::What::kCount;
  count.view = 1;
  absent->callStore(count, Deadline::after(kLong));  // by now it has got to that
  auto looking = std::async(std::launch::async, [absent] {
    const Deadline deadline = Deadline::after(kLong);
    while (absent->view().has(absent->id()) && !deadline.expired()) std::this_thread::yield();
    try {
      absent->awaitView(1, Deadline::after(kLong));
      return std::string("a view");
    } catch (const ElasticError& error) {
      return std::string(error.kind() == ElasticErrorKind::kLeftOut ? "left out" : error.what());
    }
  });
  std::vector<std::future<View>> waiting;
  for (const auto& member : job.members) {
    waiting.push_back(std::async(std::launch::async, [member, absent] {
      return member->awaitView(1, Deadline::after(kLong), {}, {}, {absent->id()});
    }));
  }
  for (auto& one : waiting) EXPECT_EQ(one.get().members.size(), 2U);
  EXPECT_EQ(looking.get(), "left out");
}

// A process that knows the job's secret, and talks to its members.
class Visitor {
 public:
  explicit Visitor(const Founding& founding) {
    onLoop(loop_, [&] {
      MemberNetwork::Events events;
      events.on_message = [this](const MemberId&, const FrameHeader&, const std::string& payload) {
        const auto message = decodeElasticMessage(payload);
        if (message && message->view) told_ = *message->view;
      };
      events.on_connected = [](const MemberId&) {};
      events.on_lost = [](const MemberId&, Loss, const std::string&) {};
      events.on_goodbye = [](const MemberId&) {};
      network_ = std::make_unique<MemberNetwork>(loop_, kLong, std::move(events));
      EXPECT_EQ(network_->open(*SocketAddress::fromNumeric("127.0.0.1", 0), {}), "");
      MemberRecord record;
      record.incarnation = network_->incarnation();
      record.addresses = network_->addresses();
      network_->setSelf({MemberId::random(), 0, encodeRecord(record)});
      network_->admitMembers(founding.key);
    });
  }
  ~Visitor() {
    onLoop(loop_, [this] { network_.reset(); });
  }
  Visitor(const Visitor&) = delete;
  Visitor& operator=(const Visitor&) = delete;

  void tell(const Member& member, const ElasticMessage& message) {
    onLoop(loop_, [&] {
      network_->introduce(member);
      network_->send(member.id, FrameHeader{FrameType::kElastic}, encodeElasticMessage(message));
    });
  }
  View told() {
    View view;
    onLoop(loop_, [&] { view = told_; });
    return view;
  }

 private:
  EventLoop loop_{"ft-test"};
  std::unique_ptr<MemberNetwork> network_;
  View told_;
};

// Others may have nobody else to hear of it from.
TEST(ElasticMember, WhoIsLeftOutAnswersWithTheViewThatIsWithoutIt) {
  Job job;
  job.found(3);
  const View first = job.awaitViews(0)[0];
  const auto absent = job.members.back();
  job.members.pop_back();
  absent->setReady(false);
  std::vector<std::future<View>> waiting;
  for (const auto& member : job.members) {
    waiting.push_back(std::async(std::launch::async, [member, absent] {
      return member->awaitView(1, Deadline::after(kLong), {}, {}, {absent->id()});
    }));
  }
  for (auto& one : waiting) EXPECT_FALSE(one.get().has(absent->id()));
  EXPECT_THROW(absent->awaitView(1, Deadline::after(kLong)), ElasticError);
  Visitor visitor(*JobStore(job.store->comparing("visitor"), "job/").founding());
  ElasticMessage behind;
  behind.kind = ElasticKind::kBehind;
  behind.lineage = first.lineage;
  behind.number = 1;
  visitor.tell(first.members[static_cast<size_t>(first.rankOf(absent->id()))], behind);
  EXPECT_TRUE(waitFor([&] { return visitor.told().number == 2; }));
  EXPECT_FALSE(visitor.told().has(absent->id()));
  EXPECT_TRUE(visitor.told().secret.isZero());
}

// Whoever tells it: another member may have heard of it before the two say so themselves.
TEST(ElasticMember, OfTwoThatCannotConnectTheLaterIsLeftOut) {
  Job job;
  job.found(4);
  const View first = job.awaitViews(0)[0];
  const MemberId early = first.members[1].id;
  const MemberId late = first.members[3].id;
  std::vector<std::future<std::string>> waiting;
  for (const auto& member : job.members) {
    waiting.push_back(std::async(std::launch::async, [member, early, late] {
      try {
        const View view =
            member->awaitView(1, Deadline::after(kLong), {}, {std::minmax(early, late)});
        return std::string(view.has(early) && !view.has(late) ? "goes on" : "another view");
      } catch (const ElasticError& error) {
        return std::string(error.kind() == ElasticErrorKind::kLeftOut ? "left out" : error.what());
      }
    }));
  }
  for (size_t i = 0; i < waiting.size(); ++i) {
    EXPECT_EQ(waiting[i].get(), job.members[i]->id() == late ? "left out" : "goes on");
  }
}

TEST(ElasticMember, ANewcomerIsTakenInAtOneBoundary) {
  Job job;
  job.found(2);
  job.awaitViews(0);
  auto newcomer = job.join(2);
  auto place = std::async(std::launch::async,
                          [&] { return newcomer->awaitView(0, Deadline::after(kLong)); });
  bool seen = false;
  for (int tries = 0; tries < 500 && !seen; ++tries) {
    const std::vector<Answer> answers = job.agree(1, {true, true});
    EXPECT_EQ(answers[0].waiting, answers[1].waiting);
    seen = !answers[0].waiting.empty();
  }
  ASSERT_TRUE(seen);
  std::vector<View> views = job.awaitViews(1);
  views.push_back(place.get());
  expectOneView(views, 2, 3);
  EXPECT_EQ(views[0].voters.size(), 2U);
  job.members.push_back(newcomer);
  for (const Answer& answer : job.agree(2, {true, true, true})) EXPECT_TRUE(answer.ok);
}

TEST(ElasticMember, ASpareIsNothingToDoFor) {
  Job job;
  job.found(2, 2);
  job.awaitViews(0);
  const auto spare = job.join(2);
  auto place =
      std::async(std::launch::async, [&] { return spare->awaitView(0, Deadline::after(kLong)); });
  for (int tries = 0; tries < 500 && job.members[0]->waiting().empty(); ++tries) {
    job.agree(1, {true, true});
  }
  ASSERT_EQ(job.members[0]->waiting().size(), 1U);
  EXPECT_TRUE(job.agree(1, {true, true})[0].waiting.empty());
  job.members.pop_back();  // there is room now
  const View view = job.awaitViews(1)[0];
  EXPECT_EQ(view.members.size(), 2U);
  EXPECT_EQ(place.get(), view);
}

TEST(ElasticMember, ANewcomerIsToldThatTheJobHasEnded) {
  Job job;
  job.found(2);
  job.awaitViews(0);
  job.members.clear();
  const auto newcomer = job.join(2);
  try {
    newcomer->awaitView(0, Deadline::after(kLong));
    FAIL() << "expected an error";
  } catch (const ElasticError& error) {
    EXPECT_NE(std::string(error.what()).find("another name"), std::string::npos) << error.what();
  }
}

TEST(ElasticMember, AStoreThatRestartedEmptyIsAppointedAnew) {
  Job job;
  job.found(2);
  const View first = job.awaitViews(0)[0];
  job.store->clear();
  bool seen = false;
  for (int tries = 0; tries < 4000 && !seen; ++tries) {
    const std::vector<Answer> answers = job.agree(1, {true, true});
    EXPECT_EQ(answers[0].new_witness, answers[1].new_witness);
    seen = answers[0].new_witness;
    std::this_thread::sleep_for(milliseconds(1));
  }
  ASSERT_TRUE(seen);
  const View second = job.awaitViews(1)[0];
  EXPECT_NE(second.witness, first.witness);
  job.agree(2, {true, true});
  job.members.pop_back();  // half and the new witness go on
  expectOneView(job.awaitViews(2), 3, 1);
}

TEST(ElasticMember, AStoreThatRestartedEmptyStillHasTheJob) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  job.store->clear();
  while (!job.store->peek("job/founding")) std::this_thread::yield();
  std::vector<std::shared_ptr<ElasticMember>> late;
  for (int i = 0; i < 3; ++i) late.push_back(job.join(3));  // as many as would found one
  std::vector<std::future<View>> places;
  for (const auto& one : late) {
    places.push_back(std::async(std::launch::async,
                                [one] { return one->awaitView(0, Deadline::after(kLong)); }));
  }
  bool seen = false;
  for (int tries = 0; tries < 4000 && !seen; ++tries) {
    seen = job.agree(1, {true, true, true})[0].waiting.size() == 3;
  }
  ASSERT_TRUE(seen);
  expectOneView(job.awaitViews(1), 2, 6);
  for (auto& place : places) EXPECT_EQ(place.get().number, 2U);
}

TEST(ElasticMember, GoesOnAloneWithoutAQuorum) {
  Job job;
  job.found(4);
  const View first = job.awaitViews(0)[0];
  job.members.resize(1);
  const auto member = job.members[0];
  EXPECT_THROW(member->awaitView(1, Deadline::after(milliseconds(300))), ElasticError);
  const View alone = member->goOnAlone(Deadline::after(kLong));
  EXPECT_EQ(alone.number, 2U);
  EXPECT_EQ(alone.members.size(), 1U);
  EXPECT_NE(alone.lineage, first.lineage);
  EXPECT_TRUE(job.agree(2, {true})[0].ok);
}

// The rest joins it anew. Its job is one like others: it appoints the store, by which both rules
// let one of two go on.
TEST(ElasticMember, WhoGoesOnAloneTakesNewcomersInAndGoesOnWithoutThem) {
  for (const bool store_rule : {false, true}) {
    Job job;
    job.store_rule = store_rule;
    job.found(4);
    job.awaitViews(0);
    job.members.resize(1);
    const View alone = job.members[0]->goOnAlone(Deadline::after(kLong));
    job.members.push_back(job.join(4));
    auto place = std::async(std::launch::async, [newcomer = job.members[1]] {
      return newcomer->awaitView(0, Deadline::after(kLong));
    });
    ASSERT_TRUE(waitFor([&] { return !job.members[0]->waiting().empty(); }));
    const View two = job.members[0]->awaitView(alone.number, Deadline::after(kLong));
    expectOneView({two, place.get()}, alone.number + 1, 2);
    EXPECT_EQ(two.lineage, alone.lineage);
    uint64_t number = two.number;
    const auto agree = [&] { return job.agree(number, {true, true})[0]; };
    ASSERT_TRUE(agree().ok);  // so the newcomer counts among those who decide
    if (two.witness.isZero()) {
      ASSERT_TRUE(waitFor([&] { return agree().new_witness; }));
      number = job.awaitViews(number)[0].number;
    }
    job.members.resize(1);
    const View last = job.awaitViews(number)[0];
    EXPECT_EQ(last.members.size(), 1U);
    EXPECT_EQ(last.lineage, alone.lineage);
    EXPECT_TRUE(last.store_decided);
  }
}

TEST(ElasticMember, WhoGoesOnAloneIsGoneForTheOthers) {
  Job job;
  job.found(3);
  const View first = job.awaitViews(0)[0];
  const auto alone = job.members.back();
  job.members.pop_back();
  const View other = alone->goOnAlone(Deadline::after(kLong));
  const std::vector<View> views = job.awaitViews(1);
  expectOneView(views, 2, 2);
  EXPECT_EQ(views[0].lineage, first.lineage);
  EXPECT_NE(other.lineage, first.lineage);
}

TEST(ElasticMember, WhoGoesOnAloneEndsTheAttemptToFormWithIt) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  const auto alone = job.members.back();
  job.members.pop_back();
  for (const auto& member : job.members) member->watchForming(true);
  alone->goOnAlone(Deadline::after(kLong));
  for (const auto& member : job.members) {
    EXPECT_TRUE(waitFor([&] { return member->isOver(1); }));
  }
}

TEST(ElasticMember, LeavesAtABoundary) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  job.members[2]->setLeaving();
  const std::vector<Answer> answers = job.agree(1, {true, true, true});
  ASSERT_EQ(answers[0].leaving.size(), 1U);
  EXPECT_EQ(answers[0].leaving[0], job.members[2]->id());
  const auto leaver = job.members[2];
  job.members.pop_back();
  expectOneView(job.awaitViews(1), 2, 2);
  EXPECT_TRUE(leaver->leave(Deadline::after(kLong)));
}

// Whoever returned from the last agreement first may go at once; the others get their answer.
TEST(ElasticMember, NobodyIsLeftInTheLastAgreement) {
  for (int round = 0; round < 30; ++round) {
    Job job;
    job.found(3);
    job.awaitViews(0);
    std::vector<std::future<bool>> working;
    for (const auto& member : job.members) {
      working.push_back(std::async(std::launch::async, [member] {
        bool good = true;
        for (int step = 0; step < 5; ++step) {
          Vote vote;
          vote.ok = true;
          good = member->agree(1, vote, Deadline::after(kLong)).ok && good;
        }
        return member->leave(Deadline::after(kLong)) && good;
      }));
    }
    for (auto& one : working) EXPECT_TRUE(one.get());
  }
}

TEST(ElasticMember, TheViewsStoreAnswersAllItsMembers) {
  Job job;
  job.found(3);
  job.awaitViews(0);
  auto waiting = std::async(std::launch::async, [&] {
    StoreCall get;
    get.view = 1;
    get.keys = {"a", "b"};
    get.wait = true;
    return job.members[2]->callStore(get, Deadline::after(kLong));
  });
  for (const std::string key : {"a", "b"}) {
    StoreCall set;
    set.what = StoreCall::What::kSet;
    set.view = 1;
    set.keys = {key};
    set.value = "value of " + key;
    job.members[key == "a" ? 0 : 1]->callStore(set, Deadline::after(kLong));
  }
  const StoreAnswer found = waiting.get();
  ASSERT_EQ(found.values.size(), 2U);
  EXPECT_EQ(found.values[1], "value of b");
}

// Members who cannot decide on the next view do not wait in the last one meanwhile.
TEST(ElasticMember, TheStoreOfAViewThatIsOverAnswersNobodyThoughNoOtherIsDecided) {
  Job job;
  job.found(2);
  job.awaitViews(0);
  job.store->fail("gone");
  const auto member = job.members.front();
  auto waiting = std::async(std::launch::async, [&] {
    StoreCall get;
    get.view = 1;
    get.keys = {"never set"};
    get.wait = true;
    return member->callStore(get, Deadline::after(kLong));
  });
  job.members.pop_back();
  EXPECT_THROW(member->awaitView(1, Deadline::after(std::chrono::seconds(1))), ElasticError);
  const Deadline promptly = Deadline::after(kLong / 2);
  EXPECT_THROW(waiting.get(), StoreError);
  EXPECT_FALSE(promptly.expired());
}

}  // namespace
}  // namespace torchft_ext

// Jobs without a store: their processes find each other by the addresses of some of them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpp/elastic/elastic_jobs.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

using elastic_test::awaitThreadOf;
using elastic_test::beAbsent;
using elastic_test::kLong;
using elastic_test::MemberPtr;
using elastic_test::whyNoView;

// Of this process alone: the system gives nobody a port below 32768 that asks for any, and other
// processes begin elsewhere.
std::vector<uint16_t> freePorts(size_t count) {
  constexpr int kFirst = 10000;
  constexpr int kOfAProcess = 8;
  const int first = kFirst + getpid() % 2500 * kOfAProcess;
  std::vector<uint16_t> ports;
  for (int port = first; port < first + kOfAProcess && ports.size() < count; ++port) {
    const auto number = static_cast<uint16_t>(port);
    std::string error;
    const auto free =
        listenOn(*SocketAddress::fromNumeric("127.0.0.1", 0), PortRange{number, number}, &error);
    if (free) ports.push_back(number);
  }
  return ports;
}

class ElasticListed : public testing::Test {
 protected:
  // As the process with that place in the list; past its end: one that is not listed.
  std::future<MemberPtr> join(size_t i, int size, const std::string& key = "the job's key") {
    return std::async(std::launch::async, [this, i, size, key] {
      ElasticOptions options;
      options.job = "test";
      options.size = size;
      options.rules.store_rule = store_rule_;
      options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
      if (i < ports_.size()) options.ports = {ports_[i], ports_[i]};
      options.limit = std::chrono::seconds(2);
      options.listed = [this] { return addresses(); };
      options.key = key;
      if (store_) options.store = store_->comparing("member");
      options.prefix = "job/";
      return ElasticMember::join(options, Deadline::after(limit_));
    });
  }
  std::vector<SocketAddress> addresses() const {
    std::vector<SocketAddress> all;
    for (const uint16_t port : ports_)
      all.push_back(*SocketAddress::fromNumeric("127.0.0.1", port));
    return all;
  }
  std::vector<MemberPtr> found(size_t size) {
    std::vector<std::future<MemberPtr>> joining;
    for (size_t i = 0; i < size; ++i) joining.push_back(join(i, static_cast<int>(size)));
    std::vector<MemberPtr> members;
    for (auto& one : joining) members.push_back(one.get());
    return members;
  }
  static View awaitView(const MemberPtr& member, uint64_t newer_than) {
    return member->awaitView(newer_than, Deadline::after(kLong));
  }
  static std::future<Answer> agree(const MemberPtr& member, uint64_t view) {
    return std::async(std::launch::async, [member, view] {
      Vote vote;
      vote.ok = true;
      return member->agree(view, vote, Deadline::after(kLong));
    });
  }

  static void leaveOutTheFirst(const std::vector<MemberPtr>& members) {
    for (const MemberPtr& member : members) awaitView(member, 0);
    leaveOut(members[0], {members.begin() + 1, members.end()}, 1);
  }
  static void leaveOut(const MemberPtr& absent, const std::vector<MemberPtr>& others,
                       uint64_t view) {
    beAbsent(absent, view);
    std::vector<std::future<View>> deciding;
    for (const MemberPtr& member : others) {
      deciding.push_back(std::async(std::launch::async, [&absent, member, view] {
        return member->awaitView(view, Deadline::after(kLong), {}, {}, {absent->id()});
      }));
    }
    for (auto& one : deciding) EXPECT_EQ(one.get().members.size(), others.size());
    EXPECT_THROW(awaitView(absent, view), ElasticError);
  }
  // One of the members leaves, and the other is the first in the next view.
  static void goOnWithout(const MemberPtr& leaver, const MemberPtr& other, uint64_t view) {
    leaver->setLeaving();
    awaitThreadOf(leaver, view);
    EXPECT_FALSE(awaitView(other, view).has(leaver->id()));
    leaver->leave(Deadline::after(kLong));
  }
  static void takeIn(const MemberPtr& member, const MemberPtr& newcomer, uint64_t view) {
    auto place = std::async(std::launch::async, [&] { return awaitView(newcomer, 0); });
    EXPECT_TRUE(waitFor([&] { return !member->waiting().empty(); }));
    EXPECT_TRUE(awaitView(member, view).has(newcomer->id()));
    EXPECT_EQ(place.get().number, view + 1);
  }

  const std::vector<uint16_t> ports_ = freePorts(3);
  Duration limit_ = kLong;
  // Until all are in a view that names the store beside the list: the second.
  static void awaitWitness(const std::vector<MemberPtr>& members) {
    for (const MemberPtr& member : members) awaitView(member, 0);
    bool seen = false;
    for (int tries = 0; tries < 4000 && !seen; ++tries) {
      std::vector<std::future<Answer>> answers;
      for (const MemberPtr& member : members) answers.push_back(agree(member, 1));
      for (auto& answer : answers) seen = answer.get().new_witness;
      std::this_thread::sleep_for(milliseconds(1));
    }
    ASSERT_TRUE(seen);
    std::vector<std::future<View>> views;
    for (const MemberPtr& member : members) {
      views.push_back(std::async(std::launch::async, [member] { return awaitView(member, 1); }));
    }
    for (auto& view : views) EXPECT_FALSE(view.get().witness.isZero());
  }
  std::shared_ptr<MemoryStore> store_;
  bool store_rule_ = false;
};

TEST_F(ElasticListed, AJobIsFoundedByProcessesThatKnowAddresses) {
  const auto members = found(3);
  const View view = awaitView(members[0], 0);
  EXPECT_EQ(view.members.size(), 3U);
  EXPECT_TRUE(view.witness.isZero());
  EXPECT_EQ(awaitView(members[2], 0), view);
}

TEST_F(ElasticListed, WhoWaitsSaysWhichOfTheListedDoNotAnswer) {
  const CapturedLog log;
  auto second = join(1, 2);
  const std::string missing = "127.0.0.1:" + std::to_string(ports_[0]) + ": ";
  EXPECT_TRUE(waitFor([&] { return CapturedLog::contains("these do not answer: " + missing); }));
  const std::string own = "127.0.0.1:" + std::to_string(ports_[1]) + ": ";
  EXPECT_FALSE(CapturedLog::contains(own));
  const MemberPtr first = join(0, 2).get();
  second.get();
}

TEST_F(ElasticListed, ANewcomerFindsTheJobWhereTheFirstOfTheListIsGone) {
  auto members = found(3);
  awaitView(members[0], 0);
  members.erase(members.begin());
  auto other = std::async(std::launch::async, [&] { return awaitView(members[0], 1); });
  const View view = awaitView(members[1], 1);
  EXPECT_EQ(other.get().members.size(), 2U);
  const MemberPtr newcomer = join(7, 3).get();
  auto place = std::async(std::launch::async, [&] { return awaitView(newcomer, 0); });
  while (members[0]->waiting().empty()) std::this_thread::yield();
  auto one = std::async(std::launch::async, [&] { return awaitView(members[0], view.number); });
  EXPECT_EQ(awaitView(members[1], view.number).members.size(), 3U);
  EXPECT_EQ(one.get(), place.get());
}

TEST_F(ElasticListed, WhoCameEarlierMovesToTheFirstOfTheList) {
  auto third = join(2, 3);
  auto second = join(1, 3);
  std::this_thread::sleep_for(milliseconds(300));  // they sit at the second's
  auto first = join(0, 3);
  const std::vector<MemberPtr> members = {first.get(), second.get(), third.get()};
  for (const MemberPtr& member : members) EXPECT_EQ(awaitView(member, 0).members.size(), 3U);
}

// The members that it knew have gone since, and others have come.
TEST_F(ElasticListed, ANewcomerIsTakenToAMemberAndNotToOneThatWasLeftOut) {
  auto members = found(3);
  leaveOutTheFirst(members);
  goOnWithout(members[1], members[2], 2);
  const MemberPtr second = join(1, 3).get();
  takeIn(members[2], second, 3);
  goOnWithout(members[2], second, 4);
  const MemberPtr newcomer = join(7, 3).get();
  takeIn(second, newcomer, 5);
}

// Who was left out earlier, and stands before it in the list, knows nobody who is still there.
TEST_F(ElasticListed, ANewcomerIsTakenToTheMembersByWhoWasLeftOutLast) {
  auto members = found(3);
  leaveOutTheFirst(members);
  const MemberPtr unlisted = join(7, 3).get();
  takeIn(members[1], unlisted, 2);
  awaitView(members[2], 2);
  std::vector<std::future<Answer>> voting;  // an ok makes the newcomer a voter
  for (const MemberPtr& member : {members[1], members[2], unlisted}) {
    voting.push_back(agree(member, 3));
  }
  for (auto& one : voting) EXPECT_TRUE(one.get().ok);
  leaveOut(members[1], {members[2], unlisted}, 3);
  goOnWithout(members[2], unlisted, 4);
  const MemberPtr newcomer = join(8, 3).get();
  takeIn(unlisted, newcomer, 5);
}

TEST_F(ElasticListed, NobodyFoundsTheJobAnewAtOneThatWasLeftOut) {
  auto members = found(3);
  leaveOutTheFirst(members);
  members.resize(1);
  const MemberPtr newcomer = join(7, 1).get();
  // Others than it knew may be there, so they are waited for.
  const ElasticError error = whyNoView(newcomer, 0, std::chrono::seconds(3));
  EXPECT_EQ(error.kind(), ElasticErrorKind::kTimeout) << error.what();
}

TEST_F(ElasticListed, WhoComesToAMemberThatStaysAfterTheEndIsToldOfIt) {
  auto members = found(2);
  awaitView(members[0], 0);
  const MemberPtr spare = join(7, 2).get();
  auto waiting = std::async(std::launch::async, [&] { return whyNoView(spare, 0); });
  for (const MemberPtr& member : members) {
    EXPECT_FALSE(member->recordEnd(Deadline::after(kLong)));  // that is no record
  }
  members.erase(members.begin());
  EXPECT_EQ(waiting.get().kind(), ElasticErrorKind::kJobOver);
  try {
    join(8, 2).get();
    FAIL() << "expected that the job is over";
  } catch (const JobOverError& error) {
    EXPECT_EQ(error.members(), 2);
  }
}

TEST_F(ElasticListed, WhoDoesNotKnowTheKeyIsNotLetIn) {
  const auto members = found(2);
  limit_ = std::chrono::seconds(3);
  try {
    join(7, 2, "another key").get();
    FAIL() << "expected an error";
  } catch (const ElasticError& error) {
    EXPECT_NE(std::string(error.what()).find("does not know the job's key"), std::string::npos)
        << error.what();
  }
}

TEST_F(ElasticListed, AStoreBesideTheListBecomesTheWitness) {
  store_ = std::make_shared<MemoryStore>();
  auto members = found(2);
  awaitWitness(members);
  members.pop_back();
  EXPECT_EQ(awaitView(members[0], 2).members.size(), 1U);
}

// The first view names none, so the members decide on the second by their quorum.
TEST_F(ElasticListed, AStoreBesideTheListDecidesByItsRule) {
  store_ = std::make_shared<MemoryStore>();
  store_rule_ = true;
  auto members = found(3);
  awaitWitness(members);
  members.resize(1);
  EXPECT_EQ(awaitView(members[0], 2).members.size(), 1U);
}

}  // namespace
}  // namespace torchft_ext

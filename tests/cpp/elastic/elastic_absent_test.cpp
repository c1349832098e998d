// Whole members of an elastic job: who is left out by the others, and what it tells.
#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/elastic/elastic_jobs.h"
#include "cpp/support/net_support.h"
#include "elastic/member_network.h"

namespace torchft_ext {
namespace {

using namespace elastic_test;  // NOLINT(google-build-using-namespace)
using namespace net_test;      // NOLINT(google-build-using-namespace)

// However early it looks: a view without it is none for it.
TEST(ElasticMember, WhoIsLeftOutGetsNoView) {
  JobOfMembers job;
  job.found(3);
  job.awaitViews(0);
  const auto absent = job.members.back();
  job.members.pop_back();
  beAbsent(absent, 1);
  auto looking = std::async(std::launch::async, [absent] {
    const Deadline deadline = Deadline::after(kLong);
    while (absent->view().has(absent->id()) && !deadline.expired()) std::this_thread::yield();
    return whyNoView(absent, 1);
  });
  expectOneView(job.awaitViews(1, {absent->id()}), 2, 2);
  EXPECT_EQ(looking.get().kind(), ElasticErrorKind::kLeftOut);
}

// A process that knows the job's secret, and talks to its members.
class Client {
 public:
  explicit Client(const Founding& founding) {
    onLoop(loop_, [&] {
      MemberNetwork::Events events;
      events.on_message = [this](const MemberId&, const FrameHeader&, const std::string& payload) {
        const auto message = decodeElasticMessage(payload);
        if (message && message->view) told_ = *message->view;
      };
      events.on_connected = [](const MemberId&) {};
      events.on_disconnected = [](const MemberId&) {};
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
  ~Client() {
    onLoop(loop_, [this] { network_.reset(); });
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

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

// The members learn of its death at once, also if a generation had called it frozen.
TEST(ElasticMember, ASoleHolderThatDiesIsNotWaitedFor) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  const MemberId gone = job.members[1]->id();
  job.members[0]->setSoleHolders({gone}, std::chrono::minutes(5));
  job.members.pop_back();
  job.members[0]->suspect({{gone, "it is silent"}});
  expectOneView(job.awaitViews(1), 2, 1);
}

TEST(ElasticMember, ASoleHolderThatAnswersIsNotLost) {
  JobOfMembers job;
  job.found(2);
  job.awaitViews(0);
  const MemberId silent = job.members[1]->id();
  job.members[0]->setSoleHolders({silent}, std::chrono::minutes(5));
  job.members[0]->suspect({{silent, "it is silent"}});
  expectOneView(job.awaitViews(1), 2, 2);
}

// Others may have nobody else to hear of it from.
TEST(ElasticMember, WhoIsLeftOutAnswersWithTheViewThatIsWithoutIt) {
  JobOfMembers job;
  job.found(3);
  const View first = job.awaitViews(0)[0];
  const auto absent = job.members.back();
  job.members.pop_back();
  beAbsent(absent, 1);
  expectOneView(job.awaitViews(1, {absent->id()}), 2, 2);
  EXPECT_THROW(absent->awaitView(1, Deadline::after(kLong)), ElasticError);
  Client client(*JobStore(job.store->comparing("client"), "job/").founding());
  ElasticMessage behind;
  behind.kind = ElasticKind::kBehind;
  behind.lineage = first.lineage;
  behind.number = 1;
  client.tell(first.members[static_cast<size_t>(first.rankOf(absent->id()))], behind);
  EXPECT_TRUE(waitFor([&] { return client.told().number == 2; }));
  EXPECT_FALSE(client.told().has(absent->id()));
  EXPECT_TRUE(client.told().secret.isZero());
}

// Whoever tells it: another member may have heard of it before the two say so themselves.
TEST(ElasticMember, OfTwoThatCannotConnectTheLaterIsLeftOut) {
  JobOfMembers job;
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

}  // namespace
}  // namespace torchft_ext

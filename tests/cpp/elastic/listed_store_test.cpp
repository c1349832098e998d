// Of several listed members that answer: at whose place a process that comes asks for the job.
#include "elastic/listed_store.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpp/support/net_support.h"
#include "elastic/meeting_server.h"

namespace torchft_ext {
namespace {

using namespace net_test;  // NOLINT(google-build-using-namespace)
using Part = Standing::Part;

const MeetingKey& theKey() {
  static const auto* const key = new MeetingKey{"test", "the job's key"};
  return *key;
}

// A listed process, whose place says which one it is.
class Listed {
 public:
  Listed(const std::string& name, const Standing& standing) {
    onLoop(loop_, [&] {
      std::string error;
      listener_ = Listener::open(loop_, loopbackAddress(), {}, &error);
      ASSERT_TRUE(listener_) << error;
      server_ = std::make_unique<MeetingServer>(loop_, theKey());
      listener_->expect(meetingNonce(theKey().job), GenerationSecret{},
                        [this](Arrival& arrival) { return server_->admit(arrival); });
      server_->put("name", name);
      server_->setStanding(standing);
      address_ = listener_->addresses().back();
    });
  }
  ~Listed() {
    onLoop(loop_, [this] {
      listener_.reset();
      server_.reset();
    });
  }
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;

  const SocketAddress& address() const { return address_; }
  void setStanding(const Standing& standing) {
    onLoop(loop_, [&] { server_->setStanding(standing); });
  }

 private:
  EventLoop loop_{"ft-test"};
  std::shared_ptr<Listener> listener_;
  std::unique_ptr<MeetingServer> server_;
  SocketAddress address_ = loopbackAddress();
};

class ListedPlaces : public testing::Test {
 protected:
  ~ListedPlaces() override {
    store_.reset();
    onLoop(loop_, [this] { links_.reset(); });
  }
  void add(const std::string& name, const Standing& standing) {
    listed_.push_back(std::make_unique<Listed>(name, standing));
  }
  // Where the process is.
  std::string name() {
    if (!store_) {
      store_.emplace(loop_, links_, [this] {
        std::vector<SocketAddress> addresses;
        for (const auto& one : listed_) addresses.push_back(one->address());
        return addresses;
      });
    }
    const auto values = store_->getAll({"name"});
    return values ? values->front() : "nowhere";
  }

  EventLoop loop_{"ft-test"};
  std::shared_ptr<MeetingLinks> links_ = std::make_shared<MeetingLinks>(loop_, theKey());
  std::vector<std::unique_ptr<Listed>> listed_;
  std::optional<ListedStore> store_;
};

TEST_F(ListedPlaces, WithoutAJobTheFirstIsTaken) {
  add("first", {});
  add("second", {});
  EXPECT_EQ(name(), "first");
}

TEST_F(ListedPlaces, OfThoseLeftOutTheOneThatKnowsTheNewestViewIsTaken) {
  add("early", {Part::kLeftOut, 3});
  add("late", {Part::kLeftOut, 7});
  add("as late", {Part::kLeftOut, 7});
  EXPECT_EQ(name(), "late");
}

// Who is left out may know the view that is without it before the members have heard of it.
TEST_F(ListedPlaces, AMemberIsPreferredToWhoKnowsANewerView) {
  add("fresh", {});
  add("left out", {Part::kLeftOut, 9});
  add("member", {Part::kMember, 8});
  EXPECT_EQ(name(), "member");
}

TEST_F(ListedPlaces, WhoIsAtAnOldPlaceMovesToOneThatKnowsANewerView) {
  add("early", {Part::kLeftOut, 3});
  add("late", {Part::kLeftOut, 2});
  EXPECT_EQ(name(), "early");
  listed_[1]->setStanding({Part::kLeftOut, 4});
  EXPECT_TRUE(waitFor([&] { return name() == "late"; }));
}

}  // namespace
}  // namespace torchft_ext

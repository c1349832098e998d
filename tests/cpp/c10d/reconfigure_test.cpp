#include "c10d/group/reconfigure.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

MemberRecord memberOn(const std::string& host) {
  MemberRecord self;
  self.incarnation = Incarnation::random();
  self.host = host;
  self.pid = 12;
  self.addresses = {*SocketAddress::fromNumeric("10.0.0.7", 4000)};
  return self;
}

std::string handleOf(uint64_t serial, const StoreAddress& store = {"node0", 29500, "run"},
                     const std::string& host = "host-a") {
  return makeHandle(memberOn(host), serial, store);
}

TEST(Reconfigure, RanksAreThePositionsOfTheHandles) {
  const std::vector<std::string> handles{handleOf(0), handleOf(0), handleOf(1)};
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    const HandledMembership membership = membershipOf(handles, handles[rank], 5);
    EXPECT_EQ(membership.rank, static_cast<int>(rank));
    EXPECT_EQ(membership.size, 3);
    EXPECT_EQ(membership.store.prefix, membershipOf(handles, handles[0], 5).store.prefix);
  }
}

TEST(Reconfigure, MembershipsThatDifferDoNotMeet) {
  const std::vector<std::string> handles{handleOf(0), handleOf(0)};
  const std::string prefix = membershipOf(handles, handles[0], 5).store.prefix;
  EXPECT_NE(prefix, membershipOf(handles, handles[0], 6).store.prefix);
  EXPECT_NE(prefix, membershipOf({handles[1], handles[0]}, handles[0], 5).store.prefix);
  EXPECT_NE(prefix, membershipOf({handles[0]}, handles[0], 5).store.prefix);
}

TEST(Reconfigure, RefusesHandlesThatNameNoMembershipOfOurs) {
  const std::string own = handleOf(0);
  const std::string other = handleOf(0);
  EXPECT_THROW(membershipOf({}, own, 1), c10::ValueError);
  EXPECT_THROW(membershipOf({other}, own, 1), c10::ValueError);
  EXPECT_THROW(membershipOf({own, other, own}, own, 1), c10::ValueError);
  EXPECT_THROW(membershipOf({own, "gloo:0:1:2:"}, own, 1), c10::ValueError);
  for (const char* malformed : {"ft:", "ft:0:1:host:2", "ft:0:1@a:1/", "ft:0:1:host:2@a:1"})
    EXPECT_THROW(membershipOf({own, malformed}, own, 1), c10::ValueError) << malformed;
}

TEST(Reconfigure, MembersMeetInTheStoreOfTheFirstHandle) {
  const std::string first = handleOf(0, {"node0", 1, "run/0"});
  const std::string other = handleOf(0, {"fd00::1", 2, ""});
  const HandledMembership there = membershipOf({first, other}, other, 5);
  EXPECT_EQ(there.store.host, "node0");
  EXPECT_EQ(there.store.port, 1);
  EXPECT_TRUE(there.store.prefix.starts_with("run/0/reconfigure/5/")) << there.store.prefix;
  EXPECT_FALSE(there.own_store);
  EXPECT_TRUE(membershipOf({first, other}, first, 5).own_store);
  const HandledMembership here = membershipOf({other, first}, first, 5);
  EXPECT_EQ(here.store.host, "fd00::1");
  EXPECT_TRUE(here.store.prefix.starts_with("reconfigure/5/")) << here.store.prefix;
}

TEST(Reconfigure, AStoreHereIsNamedByAnAddressThatOthersCanReach) {
  const MemberRecord self = memberOn("host-a");
  for (const char* here : {"localhost", "127.0.0.1", "0.0.0.0", "::", "::1"})
    EXPECT_EQ(seenByOthers({here, 1, "run"}, self).host, "10.0.0.7") << here;
  EXPECT_EQ(seenByOthers({"node0", 1, "run"}, self).host, "node0");
}

TEST(Reconfigure, RefusesAStoreThatOnlyAnotherHostCanReach) {
  const StoreAddress loopback{"127.0.0.1", 1, "run"};
  const std::string there = handleOf(0, loopback, "host-b");
  const std::string own = handleOf(0, loopback, "host-a");
  EXPECT_THROW(membershipOf({there, own}, own, 1), c10::ValueError);
  const std::string neighbour = handleOf(1, loopback, "host-a");
  EXPECT_EQ(membershipOf({neighbour, own}, own, 1).rank, 1);
}

}  // namespace
}  // namespace torchft_ext

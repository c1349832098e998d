#include "c10d/reconfigure.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

std::string handleOf(uint64_t serial) {
  MemberRecord self;
  self.incarnation = Incarnation::random();
  self.host = "host-a";
  self.pid = 12;
  return makeHandle(self, serial);
}

TEST(Reconfigure, RanksAreThePositionsOfTheHandles) {
  const std::vector<std::string> handles{handleOf(0), handleOf(0), handleOf(1)};
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    const HandledMembership membership = membershipOf(handles, handles[rank], 5);
    EXPECT_EQ(membership.rank, static_cast<int>(rank));
    EXPECT_EQ(membership.size, 3);
    EXPECT_EQ(membership.prefix, membershipOf(handles, handles[0], 5).prefix);
  }
}

TEST(Reconfigure, MembershipsThatDifferDoNotMeet) {
  const std::vector<std::string> handles{handleOf(0), handleOf(0)};
  const std::string prefix = membershipOf(handles, handles[0], 5).prefix;
  EXPECT_NE(prefix, membershipOf(handles, handles[0], 6).prefix);
  EXPECT_NE(prefix, membershipOf({handles[1], handles[0]}, handles[0], 5).prefix);
  EXPECT_NE(prefix, membershipOf({handles[0]}, handles[0], 5).prefix);
}

TEST(Reconfigure, RefusesHandlesThatNameNoMembershipOfOurs) {
  const std::string own = handleOf(0);
  const std::string other = handleOf(0);
  EXPECT_THROW(membershipOf({}, own, 1), c10::ValueError);
  EXPECT_THROW(membershipOf({other}, own, 1), c10::ValueError);
  EXPECT_THROW(membershipOf({own, other, own}, own, 1), c10::ValueError);
  EXPECT_THROW(membershipOf({own, "gloo:0:1:2:"}, own, 1), c10::ValueError);
}

}  // namespace
}  // namespace torchft_ext

// Whom a proposer takes into the next view.
#include "elastic/next_view.h"

#include <gtest/gtest.h>

#include <vector>

namespace torchft_ext {
namespace {

MemberId idOf(uint8_t number) {
  MemberId id;
  id.bytes[0] = number;
  return id;
}

View viewOf(uint8_t size) {
  View view;
  view.lineage.bytes[0] = 1;
  view.number = 1;
  for (uint8_t i = 1; i <= size; ++i) {
    view.members.push_back({idOf(i), 1, {}});
    view.voters.push_back(idOf(i));
  }
  return view;
}

TEST(NextView, IsWithoutTheLaterOfTwoThatCannotConnect) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}, {idOf(3), {}}};
  promises[idOf(1)].cut = {{idOf(1), idOf(2)}};
  EXPECT_EQ(idsOf(nextView(viewOf(3), promises, {}, 100).members),
            (std::vector<MemberId>{idOf(1), idOf(3)}));
}

// Else a member that promised and froze takes the one along that lost its connection to it.
TEST(NextView, KeepsWhoCannotConnectToOneThatIsGone) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}};
  promises[idOf(2)].cut = {{idOf(1), idOf(2)}};
  EXPECT_EQ(idsOf(nextView(viewOf(3), promises, {idOf(1), idOf(3)}, 100).members),
            std::vector<MemberId>{idOf(2)});
}

TEST(NextView, KeepsWhoCannotConnectToOneThatLeaves) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}};
  promises[idOf(1)].leaving = true;
  promises[idOf(2)].cut = {{idOf(1), idOf(2)}};
  EXPECT_EQ(idsOf(nextView(viewOf(2), promises, {}, 100).members), std::vector<MemberId>{idOf(2)});
}

TEST(NextView, KeepsWhoCannotConnectToOneThatIsLeftOutAsAbsent) {
  std::map<MemberId, Promise> promises = {{idOf(1), {}}, {idOf(2), {}}, {idOf(3), {}}};
  promises[idOf(2)].absent = {idOf(1)};
  promises[idOf(3)].cut = {{idOf(1), idOf(3)}};
  EXPECT_EQ(idsOf(nextView(viewOf(3), promises, {}, 100).members),
            (std::vector<MemberId>{idOf(2), idOf(3)}));
}

}  // namespace
}  // namespace torchft_ext

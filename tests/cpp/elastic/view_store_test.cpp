// Who may use the store of a view.
#include "elastic/view_store.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace torchft_ext {
namespace {

MemberId idOf(uint8_t number) {
  MemberId id;
  id.bytes[0] = number;
  return id;
}

View viewOf(uint64_t number) {
  View view;
  view.number = number;
  view.members = {{idOf(1), 1, {}}, {idOf(2), 1, {}}};
  return view;
}

StoreCall setIn(uint64_t view, const std::string& key) {
  StoreCall call;
  call.what = StoreCall::What::kSet;
  call.view = view;
  call.keys = {key};
  return call;
}

// One that was left out may still have a connection, and knows which number comes next.
TEST(ViewStore, DoesWhatAMemberAskedBeforeTheViewBeganAndNobodyElse) {
  std::map<MemberId, StoreAnswer::Status> answers;
  ViewStoreServer server([&](const MemberId& to, uint64_t, const StoreAnswer& answer) {
    answers[to] = answer.status;
  });
  server.begin(viewOf(1));
  server.onCall(idOf(2), 1, setIn(2, "of a member"));
  server.onCall(idOf(3), 1, setIn(2, "of another"));
  EXPECT_TRUE(answers.empty());
  server.begin(viewOf(2));
  EXPECT_EQ(answers[idOf(2)], StoreAnswer::Status::kOk);
  EXPECT_EQ(answers[idOf(3)], StoreAnswer::Status::kOver);
  EXPECT_EQ(server.size(), 1U);
}

}  // namespace
}  // namespace torchft_ext

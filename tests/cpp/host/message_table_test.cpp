// Which send meets which recv, against a model that looks through plain lists.
#include "host/message_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <random>

namespace torchft_ext {
namespace {

constexpr int kAny = -1;
constexpr int kPeers = 3;

struct Model {
  struct Post {
    int id, peer;
    uint64_t tag;
  };
  struct Sent {
    Announced announced;
    uint64_t tag;
  };
  std::list<Post> posts;
  std::list<Sent> announcements;

  std::optional<int> takePostedFor(int peer, uint64_t tag) {
    const auto found = std::find_if(posts.begin(), posts.end(), [&](const Post& post) {
      return post.tag == tag && (post.peer == kAny || post.peer == peer);
    });
    if (found == posts.end()) return std::nullopt;
    const int id = found->id;
    posts.erase(found);
    return id;
  }
  std::optional<uint64_t> takeAnnouncedFor(int peer, uint64_t tag) {
    const auto found = std::find_if(announcements.begin(), announcements.end(), [&](const Sent& s) {
      return s.tag == tag && (peer == kAny || s.announced.peer == peer);
    });
    if (found == announcements.end()) return std::nullopt;
    const uint64_t number = found->announced.number;
    announcements.erase(found);
    return number;
  }
};

// A recv is told from another one by the size of its buffer.
PendingOp recvOf(int id, int peer, uint64_t tag) {
  PendingOp recv;
  recv.operation.kind = OpKind::kRecv;
  recv.operation.peer = peer;
  recv.operation.tag = tag;
  recv.operation.outputs = {{nullptr, static_cast<size_t>(id)}};
  return recv;
}

class MessageTableTest : public testing::TestWithParam<unsigned> {
 protected:
  int below(int bound) { return std::uniform_int_distribution<>(0, bound - 1)(random_); }

  void post(int id) {
    const int peer = below(kPeers + 1) - 1;
    const auto tag = static_cast<uint64_t>(below(2));
    PendingOp recv = recvOf(id, peer, tag);
    const auto found = table_.takeAnnouncedFor(recv.operation);
    const auto expected = model_.takeAnnouncedFor(peer, tag);
    ASSERT_EQ(found.has_value(), expected.has_value());
    if (found) {
      ASSERT_EQ(found->number, *expected);
    } else {
      table_.post(std::move(recv));
      model_.posts.push_back({id, peer, tag});
    }
  }
  void announce(uint64_t number) {
    const Announced announced{below(kPeers), number, 8};
    const auto tag = static_cast<uint64_t>(below(2));
    const auto found = table_.takePostedFor(announced, tag);
    const auto expected = model_.takePostedFor(announced.peer, tag);
    ASSERT_EQ(found.has_value(), expected.has_value());
    if (found) {
      ASSERT_EQ(found->operation.outputs[0].bytes, static_cast<size_t>(*expected));
    } else {
      table_.keep(announced, tag);
      model_.announcements.push_back({announced, tag});
    }
  }
  void forget() {
    const int peer = below(kPeers);
    table_.forgetAnnouncedBy(peer);
    model_.announcements.remove_if([&](const auto& each) { return each.announced.peer == peer; });
  }
  void compare() {
    EXPECT_EQ(table_.nothingPosted(), model_.posts.empty());
    for (int peer = kAny; peer < kPeers; ++peer) {
      const auto posted = std::count_if(model_.posts.begin(), model_.posts.end(),
                                        [&](const auto& each) { return each.peer == peer; });
      EXPECT_EQ(table_.hasPostedFor(peer), posted > 0);
      const auto kept =
          std::count_if(model_.announcements.begin(), model_.announcements.end(),
                        [&](const auto& each) { return each.announced.peer == peer; });
      EXPECT_EQ(table_.announcedBy(peer), static_cast<size_t>(kept));
    }
  }

  MessageTable table_;
  Model model_;
  std::mt19937 random_{GetParam()};
};

TEST_P(MessageTableTest, MatchesAsTheModelDoes) {
  for (int step = 1; step <= 2000; ++step) {
    const int what = below(41);
    if (what == 40) {
      forget();
    } else if (what < 20) {
      post(step);
    } else {
      announce(static_cast<uint64_t>(step));
    }
    if (HasFatalFailure()) FAIL() << "step " << step;
    compare();
  }
  EXPECT_EQ(table_.takeAllPosted().size(), model_.posts.size());
  EXPECT_TRUE(table_.nothingPosted());
}

INSTANTIATE_TEST_SUITE_P(Seeds, MessageTableTest, testing::Range(1U, 9U));

}  // namespace
}  // namespace torchft_ext

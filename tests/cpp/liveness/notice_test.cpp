// What members tell each other: the bytes, and what is remembered of generations that are not live.
#include "liveness/notice.h"

#include <gtest/gtest.h>

#include "liveness/notice_cache.h"
#include "net/frame.h"

namespace torchft_ext {
namespace {

using std::chrono::seconds;

Nonce generationNumber(int number) {
  Nonce nonce;
  nonce.bytes[0] = static_cast<uint8_t>(number);
  nonce.bytes[1] = static_cast<uint8_t>(number >> 8);
  return nonce;
}

Notice failed(int generation) {
  Notice notice;
  notice.type = Notice::Type::kFailed;
  notice.generation = generationNumber(generation);
  notice.dead.bytes.fill(7);
  notice.failure.kind = FailureKind::kPeerLost;
  notice.failure.cause = {3, -1, "host-b", 812, "its process ended"};
  return notice;
}

Notice left(int generation, int rank) {
  Notice notice;
  notice.type = Notice::Type::kLeft;
  notice.generation = generationNumber(generation);
  notice.rank = rank;
  return notice;
}

TEST(Notice, ComesOutAsItWentIn) {
  const auto failure = decodeNotice(encodeNotice(failed(5)));
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->type, Notice::Type::kFailed);
  EXPECT_EQ(failure->generation, generationNumber(5));
  EXPECT_EQ(failure->dead, failed(5).dead);
  EXPECT_EQ(failure->failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(failure->failure.cause.rank, 3);
  EXPECT_EQ(failure->failure.cause.host, "host-b");
  EXPECT_EQ(failure->failure.cause.how, "its process ended");
  const auto leaver = decodeNotice(encodeNotice(left(5, 9)));
  ASSERT_TRUE(leaver);
  EXPECT_EQ(leaver->rank, 9);
  EXPECT_TRUE(decodeNotice(encodeNotice(Notice{})));
  for (const auto type : {Notice::Type::kSeek, Notice::Type::kSeen}) {
    Notice sought;
    sought.type = type;
    sought.generation = Nonce::random();
    sought.sought = Incarnation::random();
    const auto read = decodeNotice(encodeNotice(sought));
    ASSERT_TRUE(read);
    EXPECT_EQ(read->type, type);
    EXPECT_EQ(read->generation, sought.generation);
    EXPECT_EQ(read->sought, sought.sought);
  }
}

TEST(Notice, RefusesEveryTruncationAndTrailingBytes) {
  for (const std::string& whole : {encodeNotice(failed(1)), encodeNotice(left(1, 2))}) {
    for (size_t length = 0; length < whole.size(); ++length) {
      EXPECT_FALSE(decodeNotice(whole.substr(0, length))) << length;
    }
    EXPECT_FALSE(decodeNotice(whole + "x"));
  }
}

TEST(Notice, RefusesUnknownTypesAndImpossibleRanks) {
  std::string bytes = encodeNotice(failed(1));
  bytes[0] = 99;
  EXPECT_FALSE(decodeNotice(bytes));
  EXPECT_FALSE(decodeNotice(encodeNotice(left(1, -1))));
}

TEST(Notice, FitsIntoItsFrameHoweverLongItsTexts) {
  Notice notice = failed(1);
  notice.failure.cause.host = std::string(100000, 'h');
  notice.failure.cause.how = std::string(100000, 'x');
  const std::string bytes = encodeNotice(notice);
  EXPECT_LE(bytes.size(), longestPayload(FrameType::kNotice));
  const auto after = decodeNotice(bytes);
  ASSERT_TRUE(after);
  EXPECT_EQ(after->generation, notice.generation);
}

class NoticeCacheTest : public ::testing::Test {
 protected:
  Clock::time_point now{seconds(1000)};
  NoticeCache cache;
};

TEST_F(NoticeCacheTest, KeepsWhatComesAheadUntilTheGenerationBegins) {
  cache.keep(now, left(1, 4));
  cache.keep(now, failed(2));
  cache.keep(now, failed(1));
  const std::vector<Notice> found = cache.begin(now, generationNumber(1));
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].rank, 4);
  EXPECT_EQ(found[1].type, Notice::Type::kFailed);
  EXPECT_EQ(cache.ahead(), 1U);
  EXPECT_TRUE(cache.begin(now, generationNumber(1)).empty());
}

TEST_F(NoticeCacheTest, SaysTheSameOnceAndEachLeaver) {
  for (int i = 0; i < 10; ++i) cache.keep(now, failed(1));
  cache.keep(now, left(1, 4));
  cache.keep(now, left(1, 5));
  EXPECT_EQ(cache.ahead(), 3U);
}

TEST_F(NoticeCacheTest, DropsWhatIsBehind) {
  cache.end(now, left(1, 0));
  cache.keep(now, failed(1));
  EXPECT_EQ(cache.ahead(), 0U);
  ASSERT_NE(cache.outcomeOf(generationNumber(1)), nullptr);
  EXPECT_EQ(cache.outcomeOf(generationNumber(1))->type, Notice::Type::kLeft);
  EXPECT_EQ(cache.outcomeOf(generationNumber(2)), nullptr);
}

TEST_F(NoticeCacheTest, IsBoundedInNumberAndTime) {
  for (int i = 0; i < 2000; ++i) {
    cache.keep(now, failed(i));
    cache.end(now, failed(3000 + i));
  }
  EXPECT_EQ(cache.ahead(), NoticeCache::kMostAhead);
  EXPECT_EQ(cache.over(), NoticeCache::kMostOver);
  EXPECT_TRUE(cache.begin(now, generationNumber(0)).empty()) << "the oldest go first";
  EXPECT_FALSE(cache.begin(now, generationNumber(1999)).empty());
  now += NoticeCache::kOverFor;
  cache.begin(now, generationNumber(9999));
  EXPECT_EQ(cache.ahead() + cache.over(), 0U);
}

}  // namespace
}  // namespace torchft_ext

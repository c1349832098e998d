// What is written for an attempt, and read back.
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "cpp/membership/rendezvous_support.h"

namespace torchft_ext {
namespace {

using namespace rendezvous_test;  // NOLINT(google-build-using-namespace)

TEST(Records, ARecordSurvivesTheRoundTrip) {
  MemberRecord before = record(7);
  before.purpose = "group 'a'";
  const auto after = decodeRecord(encodeRecord(before));
  ASSERT_TRUE(after);
  EXPECT_EQ(after->incarnation, before.incarnation);
  EXPECT_EQ(after->token, before.token);
  EXPECT_EQ(after->host, before.host);
  EXPECT_EQ(after->pid, before.pid);
  EXPECT_EQ(after->addresses, before.addresses);
  EXPECT_EQ(after->liveness_addresses, before.liveness_addresses);
  EXPECT_EQ(after->purpose, before.purpose);
}

TEST(Records, ARosterSurvivesTheRoundTrip) {
  const Roster before{
      Nonce::random(), GenerationSecret::random(), {record(1), record(2), record(3)}};
  const Token token = Token::random();
  const std::string bytes = encodeGo(token, before);
  const auto after = decodeGo(bytes);
  ASSERT_TRUE(after);
  EXPECT_EQ(after->token, token);
  EXPECT_EQ(after->roster.nonce, before.nonce);
  EXPECT_EQ(after->roster.secret, before.secret);
  ASSERT_EQ(after->roster.members.size(), 3U);
  EXPECT_EQ(after->roster.members[2].incarnation, before.members[2].incarnation);
}

TEST(Records, AFailureRecordSurvivesTheRoundTripAndIsNoRecord) {
  FailureRecord before{record(7), {}, {Token::random(), Token::random()}};
  before.ending.failure.kind = FailureKind::kPeerLost;
  before.ending.failure.cause = {2, -1, "host-9", 9, "its process ended"};
  before.ending.origin = Token::random();
  before.ending.culprit = Incarnation::random();
  const std::string bytes = encodeFailureRecord(before);
  const auto after = decodeFailureRecord(bytes);
  ASSERT_TRUE(after);
  EXPECT_EQ(after->member.token, before.member.token);
  EXPECT_EQ(after->ending.failure.kind, FailureKind::kPeerLost);
  EXPECT_EQ(after->ending.failure.cause.rank, 2);
  EXPECT_EQ(after->ending.failure.cause.how, "its process ended");
  EXPECT_EQ(after->ending.origin, before.ending.origin);
  EXPECT_EQ(after->ending.culprit, before.ending.culprit);
  EXPECT_EQ(after->meant_for, before.meant_for);
  EXPECT_FALSE(decodeRecord(bytes));
  EXPECT_FALSE(decodeFailureRecord(encodeRecord(before.member)));
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(decodeFailureRecord(bytes.substr(0, length)));
  EXPECT_FALSE(decodeFailureRecord(bytes + "x"));
}

TEST(Records, TruncatedExtendedAndOversizedBytesAreRefused) {
  const std::string good = encodeRecord(record(7));
  const std::string go =
      encodeGo(Token::random(), {Nonce::random(), GenerationSecret::random(), {record(1)}});
  for (size_t length = 0; length < good.size(); ++length)
    EXPECT_FALSE(decodeRecord(good.substr(0, length)));
  for (size_t length = 0; length < go.size(); ++length)
    EXPECT_FALSE(decodeGo(go.substr(0, length)));
  EXPECT_FALSE(decodeRecord(good + "x"));
  EXPECT_FALSE(decodeGo(go + "x"));
  EXPECT_FALSE(decodeRecord(std::string(5000, '\1')));
  EXPECT_FALSE(decodeGo(std::string((size_t{1} << 20) + 1, '\1')));
}

TEST(Records, EveryChangedByteIsRefusedOrChangesTheValue) {
  const std::string go = encodeGo(
      Token::random(), {Nonce::random(), GenerationSecret::random(), {record(1), record(2)}});
  int refused = 0;
  for (size_t at = 0; at < go.size(); ++at) {
    for (const char value : {'\0', '\x7f', '\xff'}) {
      std::string changed = go;
      changed[at] = value;
      const std::optional<Go> found = decodeGo(changed);
      refused += found ? 0 : 1;
      if (!found) continue;
      EXPECT_EQ(encodeGo(found->token, found->roster), changed) << "byte " << at;
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(Records, AnEndlessHostNameAndAddressListAreCut) {
  MemberRecord big = record(1);
  big.host = std::string(100000, 'h');
  big.addresses.assign(1000, *SocketAddress::fromNumeric("10.0.0.1", 1));
  const auto after = decodeRecord(encodeRecord(big));
  ASSERT_TRUE(after);
  EXPECT_EQ(after->host.size(), 255U);
  EXPECT_EQ(after->addresses.size(), 16U);
}

}  // namespace
}  // namespace torchft_ext

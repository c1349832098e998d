#include "net/failure_frame.h"

#include <gtest/gtest.h>

namespace torchft_ext {
namespace {

Failure example() {
  Failure failure;
  failure.kind = FailureKind::kConnectionLost;
  failure.cause = {2, 1, "host-b", 812, "the connection broke although its process lives"};
  failure.op = "allreduce";
  failure.seq = 42;
  return failure;
}

TEST(FailureFrame, CarriesKindAndCauseButNotThePlace) {
  const auto decoded = decodeFailure(encodeFailure(example()), 4);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->kind, FailureKind::kConnectionLost);
  EXPECT_EQ(decoded->cause.rank, 2);
  EXPECT_EQ(decoded->cause.other_rank, 1);
  EXPECT_EQ(decoded->cause.host, "host-b");
  EXPECT_EQ(decoded->cause.pid, 812);
  EXPECT_EQ(decoded->cause.how, example().cause.how);
  EXPECT_EQ(decoded->op, "");
  EXPECT_EQ(decoded->seq, -1);
}

TEST(FailureFrame, RefusesARankOutsideTheGeneration) {
  EXPECT_FALSE(decodeFailure(encodeFailure(example()), 2));
  Failure failure = example();
  failure.cause.rank = -2;
  EXPECT_FALSE(decodeFailure(encodeFailure(failure), 4));
}

TEST(FailureFrame, RefusesAnUnknownKind) {
  std::string payload = encodeFailure(example());
  payload[0] = 0;
  EXPECT_FALSE(decodeFailure(payload, 4));
  payload[0] = 99;
  EXPECT_FALSE(decodeFailure(payload, 4));
}

TEST(FailureFrame, RefusesEveryTruncationAndTrailingBytes) {
  const std::string payload = encodeFailure(example());
  for (size_t length = 0; length < payload.size(); ++length) {
    EXPECT_FALSE(decodeFailure(payload.substr(0, length), 4)) << length;
  }
  EXPECT_FALSE(decodeFailure(payload + "x", 4));
}

TEST(FailureFrame, BoundsWhatItSends) {
  Failure failure = example();
  failure.cause.how = std::string(100000, 'x');
  failure.cause.host = std::string(100000, 'h');
  const std::string payload = encodeFailure(failure);
  EXPECT_LT(payload.size(), 1024u);
  EXPECT_TRUE(decodeFailure(payload, 4));
}

}  // namespace
}  // namespace torchft_ext

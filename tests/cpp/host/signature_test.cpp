#include <gtest/gtest.h>

#include "cpp/host/schedule_support.h"
#include "host/schedule.h"

namespace torchft_ext {
namespace {

TEST(Signature, TellsOperationsApart) {
  std::vector<float> items(10);
  Operation base = operationOf<float>(OpKind::kAllreduce);
  base.outputs = {bufferOf(items)};
  Operation other = base;
  EXPECT_EQ(signatureOf(base), signatureOf(other));
  other.reduce = ReduceKind::kMax;
  EXPECT_NE(signatureOf(base), signatureOf(other));
  other = base;
  other.dtype = DType::kInt32;
  EXPECT_NE(signatureOf(base), signatureOf(other));
  other = base;
  other.outputs[0].bytes = 36;
  EXPECT_NE(signatureOf(base), signatureOf(other));
  other = base;
  other.kind = OpKind::kBroadcast;
  EXPECT_NE(signatureOf(base), signatureOf(other));
  Operation third = other;
  third.root = 2;
  EXPECT_NE(signatureOf(third), signatureOf(other));
}

TEST(Signature, IgnoresWhatOnlyOneRankKnows) {
  std::vector<float> items(10);
  Operation root = operationOf<float>(OpKind::kGather, ReduceKind::kSum, 1);
  root.inputs = {bufferOf(items)};
  Operation other = root;
  root.outputs = {bufferOf(items), bufferOf(items)};
  EXPECT_EQ(signatureOf(root), signatureOf(other));
}

TEST(Signature, SaysWhatTheOperationIs) {
  EXPECT_EQ(
      describeSignature(signatureOf(operationOf<float>(OpKind::kReduce, ReduceKind::kMax, 3))),
      "reduce (max) of float32 with root 3");
  EXPECT_EQ(describeSignature(signatureOf(Operation{})), "barrier");
  EXPECT_EQ(describeSignature(signatureOfMessage(DType::kUint8)), "send of uint8");
  constexpr uint8_t kUint16 = 27 + 1;
  EXPECT_EQ(describeSignature(signatureOfMessage(DType::kUint8, kUint16)), "send of uint16");
  EXPECT_EQ(describeSignature(signatureOfMessage(DType::kUint8, 200)),
            "send of torch's dtype number 199");
  EXPECT_EQ(describeSignature(~uint64_t{0}), "an unknown operation");
}

TEST(Signature, TellsBucketsOfOtherLayoutsApart) {
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kBarrier}) {
    Operation one = operationOf<float>(kind);
    one.layout = 0x123456789abcdef;
    Operation other = one;
    EXPECT_FALSE(differInLayout(signatureOf(one), signatureOf(other)));
    other.layout = 0xfedcba987654321;
    EXPECT_TRUE(differInLayout(signatureOf(one), signatureOf(other)));
    other.layout = 0;
    EXPECT_NE(signatureOf(one), signatureOf(other));
    EXPECT_FALSE(differInLayout(signatureOf(one), signatureOf(other)));
  }
}

TEST(Signature, SaysThatTheOperationIsABuckets) {
  Operation bucket = operationOf<float>(OpKind::kAllreduce);
  bucket.layout = 1;
  EXPECT_EQ(describeSignature(signatureOf(bucket)),
            "allreduce of a bucket of gradients (sum) in float32");
}

}  // namespace
}  // namespace torchft_ext

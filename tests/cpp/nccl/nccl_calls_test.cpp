// From operations to NCCL's calls.
#include "nccl/nccl_calls.h"

#include <gtest/gtest.h>

#include "cpp/nccl/scripted_nccl.h"
#include "cpp/support/wait_for.h"
#include "nccl/call_gate.h"

namespace torchft_ext {
namespace {

using Calls = std::vector<std::string>;

uint8_t memory[4096];

Buffer at(size_t offset, size_t bytes) {
  return {memory + offset, bytes};
}

// The calls of an operation on rank 1 of 3.
Calls callsOf(const Operation& operation, bool flat = false) {
  ScriptedNccl nccl;
  EXPECT_EQ(whyUnsupported(operation, nccl), "");
  EXPECT_EQ(makeCalls(operation, flat, {nccl, nullptr, nullptr, 1, 3, 0, memory}),
            NcclResult::kSuccess);
  return nccl.calls();
}

Operation reducing(OpKind kind, DType dtype, ReduceKind reduce) {
  Operation operation;
  operation.kind = kind;
  operation.dtype = dtype;
  operation.reduce = reduce;
  operation.outputs = {at(0, 16)};
  return operation;
}

TEST(NcclCalls, FlagsAreReducedAsBytes) {
  const auto flags = [](ReduceKind reduce) {
    return callsOf(reducing(OpKind::kAllreduce, DType::kBool, reduce));
  };
  EXPECT_EQ(flags(ReduceKind::kSum), Calls({"allReduce 16 of 1 by 2"}));      // any: MAX
  EXPECT_EQ(flags(ReduceKind::kProduct), Calls({"allReduce 16 of 1 by 3"}));  // all: MIN
  EXPECT_EQ(flags(ReduceKind::kMax), Calls({"allReduce 16 of 1 by 2"}));
  EXPECT_EQ(flags(ReduceKind::kMin), Calls({"allReduce 16 of 1 by 3"}));
}

TEST(NcclCalls, CountsAreElementsOfTheDtype) {
  EXPECT_EQ(callsOf(reducing(OpKind::kAllreduce, DType::kDouble, ReduceKind::kAvg)),
            Calls({"allReduce 2 of 8 by 4"}));
  EXPECT_EQ(callsOf(reducing(OpKind::kAllreduce, DType::kBFloat16, ReduceKind::kProduct)),
            Calls({"allReduce 8 of 9 by 1"}));
}

TEST(NcclCalls, WhatNcclCannotReduceIsRefusedWithItsName) {
  ScriptedNccl nccl;
  nccl.lack(NcclFeature::kFloat8);
  const auto why = [&](OpKind kind, DType dtype, ReduceKind reduce) {
    return whyUnsupported(reducing(kind, dtype, reduce), nccl);
  };
  EXPECT_NE(why(OpKind::kAllreduce, DType::kInt16, ReduceKind::kSum).find("int16"),
            std::string::npos);
  EXPECT_NE(why(OpKind::kAllreduce, DType::kBool, ReduceKind::kAvg), "");
  EXPECT_NE(why(OpKind::kReduce, DType::kFloat8E5M2, ReduceKind::kSum), "");
  // What only moves, moves as bytes.
  EXPECT_EQ(why(OpKind::kBroadcast, DType::kInt16, ReduceKind::kSum), "");
  EXPECT_EQ(why(OpKind::kBroadcast, DType::kFloat8E4M3, ReduceKind::kSum), "");
}

TEST(NcclCalls, AFactorGetsAReductionOfItsOwnThatIsDestroyedAfterTheCalls) {
  Operation operation = reducing(OpKind::kAllreduce, DType::kHalf, ReduceKind::kPreMulSum);
  EXPECT_EQ(callsOf(operation),
            Calls({"createPreMulSum 6", "allReduce 8 of 6 by 5", "destroyRedOp 5"}));
  operation.factor_on_device = memory;
  operation.kind = OpKind::kReduceScatter;
  operation.inputs = {at(0, 16), at(16, 16), at(32, 16)};
  EXPECT_EQ(callsOf(operation),
            Calls({"createPreMulSum 6 on the device", "reduce 8 of 6 by 5 to 0",
                   "reduce 8 of 6 by 5 to 1 here", "reduce 8 of 6 by 5 to 2", "destroyRedOp 5"}));
}

// Of rank 0 of 1: all elements, in calls whose counts NCCL's kernel for one rank divides evenly.
Calls callsAlone(OpKind kind, ReduceKind reduce, size_t bytes) {
  static uint8_t large[70'000];
  Operation operation = reducing(kind, DType::kFloat, reduce);
  operation.inputs = {{large, bytes}};
  operation.outputs = {{large, bytes}};
  ScriptedNccl nccl;
  EXPECT_EQ(makeCalls(operation, true, {nccl, nullptr, nullptr, 0, 1, 0, memory}),
            NcclResult::kSuccess);
  return nccl.calls();
}

TEST(NcclCalls, AWorldOfOneMultipliesWholePiecesAndThenTheRest) {
  const auto factor = ReduceKind::kPreMulSum;
  EXPECT_EQ(callsAlone(OpKind::kAllreduce, factor, 49'156),
            Calls({"createPreMulSum 7", "allReduce 12288 of 7 by 5", "allReduce 1 of 7 by 5",
                   "destroyRedOp 5"}));
  EXPECT_EQ(callsAlone(OpKind::kReduce, factor, 16'388),
            Calls({"createPreMulSum 7", "reduce 4096 of 7 by 5 to 0 here",
                   "reduce 1 of 7 by 5 to 0 here", "destroyRedOp 5"}));
  EXPECT_EQ(callsAlone(OpKind::kReduceScatter, factor, 32'776),
            Calls({"createPreMulSum 7", "reduceScatter 8192 of 7 by 5", "reduceScatter 2 of 7 by 5",
                   "destroyRedOp 5"}));
  for (const size_t bytes : {4, 16'384, 65'536})  // one call is right
    EXPECT_EQ(callsAlone(OpKind::kAllreduce, factor, bytes).size(), 3u) << bytes;
  EXPECT_EQ(callsAlone(OpKind::kAllreduce, ReduceKind::kSum, 49'156),
            Calls({"allReduce 12289 of 7 by 0"}));
}

TEST(NcclCalls, WithoutItsReductionAnOperationIsNotCalled) {
  ScriptedNccl nccl;
  nccl.answer("createPreMulSum", {NcclResult::kInternalError});
  const Operation operation = reducing(OpKind::kAllreduce, DType::kFloat, ReduceKind::kPreMulSum);
  EXPECT_EQ(makeCalls(operation, true, {nccl, nullptr, nullptr, 1, 3, 0, memory}),
            NcclResult::kInternalError);
  EXPECT_EQ(nccl.calls(), Calls({"createPreMulSum 7"}));
}

TEST(NcclCalls, ACallThatFailsLeavesNoReductionBehind) {
  ScriptedNccl nccl;
  nccl.answer("allReduce", {NcclResult::kSystemError});
  const Operation operation = reducing(OpKind::kAllreduce, DType::kFloat, ReduceKind::kPreMulSum);
  EXPECT_EQ(makeCalls(operation, true, {nccl, nullptr, nullptr, 1, 3, 0, memory}),
            NcclResult::kSystemError);
  EXPECT_EQ(nccl.calls().back(), "destroyRedOp 5");
}

TEST(NcclCalls, WholeNumbersHaveNoFactor) {
  ScriptedNccl nccl;
  const auto why = [&](DType dtype) {
    return whyUnsupported(reducing(OpKind::kAllreduce, dtype, ReduceKind::kPreMulSum), nccl);
  };
  EXPECT_NE(why(DType::kInt32), "");
  EXPECT_NE(why(DType::kBool), "");
  EXPECT_NE(why(DType::kFloat8E4M3), "");
  EXPECT_EQ(why(DType::kBFloat16), "");
}

TEST(NcclCalls, ARecvFromAnySourceIsRefused) {
  ScriptedNccl nccl;
  Operation recv = reducing(OpKind::kRecv, DType::kFloat, ReduceKind::kSum);
  recv.peer = -1;
  EXPECT_NE(whyUnsupported(recv, nccl), "");
}

Operation allgather(size_t last_bytes) {
  Operation operation;
  operation.kind = OpKind::kAllgather;
  operation.inputs = {at(1000, 8)};
  operation.outputs = {at(0, 8), at(8, 8), at(16, last_bytes)};
  return operation;
}

TEST(NcclCalls, AllgatherIntoOnePieceIsOneCall) {
  EXPECT_EQ(callsOf(allgather(8), true), Calls({"allGather 8"}));
}

// Neighbours in memory on this rank may not be neighbours on another: the calls would not pair.
TEST(NcclCalls, AllgatherIntoAListIsBroadcastsEvenIfItHappensToBeOnePiece) {
  EXPECT_EQ(callsOf(allgather(8)),
            Calls({"broadcast 8 from 0", "broadcast 8 from 1 copied", "broadcast 8 from 2"}));
}

TEST(NcclCalls, UnevenAllgatherIsBroadcastsInEitherForm) {
  const Calls expected{"broadcast 8 from 0", "broadcast 8 from 1 copied", "broadcast 4 from 2"};
  EXPECT_EQ(callsOf(allgather(4)), expected);
  EXPECT_EQ(callsOf(allgather(4), true), expected);
  EXPECT_EQ(callsOf(allgather(0)).size(), 2u);
}

TEST(NcclCalls, ReduceScatterIsOneCallOrReducesToEachRank) {
  Operation operation = reducing(OpKind::kReduceScatter, DType::kFloat, ReduceKind::kMax);
  operation.inputs = {at(0, 16), at(16, 16), at(32, 16)};
  EXPECT_EQ(callsOf(operation, true), Calls({"reduceScatter 4 of 7 by 2"}));
  EXPECT_EQ(callsOf(operation), Calls({"reduce 4 of 7 by 2 to 0", "reduce 4 of 7 by 2 to 1 here",
                                       "reduce 4 of 7 by 2 to 2"}));
}

TEST(NcclCalls, ReduceGivesTheResultToItsRootAlone) {
  Operation operation = reducing(OpKind::kReduce, DType::kInt64, ReduceKind::kMin);
  operation.inputs = {at(0, 16)};
  operation.root = 1;
  EXPECT_EQ(callsOf(operation), Calls({"reduce 2 of 4 by 3 to 1 here"}));
  operation.root = 2;
  operation.outputs.clear();
  EXPECT_EQ(callsOf(operation), Calls({"reduce 2 of 4 by 3 to 2"}));
}

TEST(NcclCalls, GatherAndScatterMoveOnlyBetweenRootAndOthers) {
  Operation gather;
  gather.kind = OpKind::kGather;
  gather.root = 1;
  gather.inputs = {at(1000, 8)};
  gather.outputs = {at(0, 8), at(8, 8), at(16, 8)};
  EXPECT_EQ(callsOf(gather),
            Calls({"recv 8 from 0", "send 8 to 1", "recv 8 from 1", "recv 8 from 2"}));
  gather.inputs = {at(8, 8)};  // in place
  EXPECT_EQ(callsOf(gather), Calls({"recv 8 from 0", "recv 8 from 2"}));
  Operation scatter;
  scatter.kind = OpKind::kScatter;
  scatter.outputs = {at(0, 8)};
  EXPECT_EQ(callsOf(scatter), Calls({"recv 8 from 0"}));
}

TEST(NcclCalls, AlltoallLeavesEmptyPartsOut) {
  Operation operation;
  operation.kind = OpKind::kAlltoall;
  operation.inputs = {at(0, 8), at(8, 4), at(12, 0)};
  operation.outputs = {at(100, 0), at(108, 4), at(112, 16)};
  EXPECT_EQ(callsOf(operation),
            Calls({"send 8 to 0", "send 4 to 1", "recv 4 from 1", "recv 16 from 2"}));
}

TEST(NcclCalls, MessagesGoToTheOtherOfThePairAndBarriersReduceOneByte) {
  Operation operation;
  operation.kind = OpKind::kSend;
  operation.peer = 2;
  operation.inputs = {at(0, 8)};
  EXPECT_EQ(callsOf(operation), Calls({"send 8 to 0"}));
  EXPECT_EQ(callsOf(Operation{}), Calls({"allReduce 1 of 1 by 2"}));
}

TEST(NcclCalls, TheFirstErrorEndsThem) {
  ScriptedNccl nccl;
  nccl.answer("broadcast", {NcclResult::kInProgress, NcclResult::kInvalidUsage});
  EXPECT_EQ(makeCalls(allgather(8), false, {nccl, nullptr, nullptr, 1, 3, 0, memory}),
            NcclResult::kInvalidUsage);
  EXPECT_EQ(nccl.calls().size(), 2u);
}

// ---- the gate

TEST(CallGate, LetsOneInAndNobodyOnceClosed) {
  CallGate gate;
  ASSERT_TRUE(gate.tryEnter());
  EXPECT_FALSE(gate.tryEnter());
  gate.close();
  EXPECT_FALSE(gate.awaitEmpty(Deadline::at(Clock::now())));
  gate.leave();
  EXPECT_TRUE(gate.awaitEmpty(testDeadline()));
  EXPECT_FALSE(gate.tryEnter());
}

TEST(CallGate, ClosingReleasesWhoWaitsAtIt) {
  CallGate gate;
  ASSERT_TRUE(gate.tryEnter());
  bool entered = true;
  std::thread waiting([&] { entered = gate.enter(testDeadline()); });
  gate.close();
  waiting.join();
  EXPECT_FALSE(entered);
}

}  // namespace
}  // namespace torchft_ext

// Finding libnccl and calling it, against stubs of it (tests/nccl/stub.cpp).
#include "nccl/nccl_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "nccl/nccl_entry_points.h"

namespace torchft_ext {
namespace {

// An address that nobody follows.
template <typename Pointer>
Pointer at(size_t address) {
  return reinterpret_cast<Pointer>(address);  // NOLINT(performance-no-int-to-ptr)
}

class NcclLibraryTest : public ::testing::Test {
 protected:
  ~NcclLibraryTest() override {
    for (const auto& [name, before] : before_) {
      if (before.empty())
        ::unsetenv(name.c_str());
      else
        ::setenv(name.c_str(), before.c_str(), 1);
    }
  }

  void set(const std::string& name, const std::string& value) {
    const char* before = std::getenv(name.c_str());
    before_.emplace(name, before == nullptr ? "" : before);
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  std::shared_ptr<NcclApi> stub(const std::string& version = "22809") {
    set("TORCHFT_EXT_NCCL_LIB", TFT_STUB_NCCL);
    set("STUB_NCCL_VERSION", version);
    auto loaded = loadNcclLibrary();
    if (const auto* why = std::get_if<std::string>(&loaded)) {
      ADD_FAILURE() << *why;
      return nullptr;
    }
    return std::get<std::shared_ptr<NcclApi>>(loaded);
  }
  // Why there is no library.
  static std::string why() {
    auto loaded = loadNcclLibrary();
    const auto* text = std::get_if<std::string>(&loaded);
    return text == nullptr ? "it was found" : *text;
  }
  // What the stub was called with since the last question.
  static std::string calls() {
    void* library = ::dlopen(TFT_STUB_NCCL, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return "no stub";
    return reinterpret_cast<const char* (*)()>(::dlsym(library, "stubNcclCalls"))();
  }

 private:
  std::map<std::string, std::string> before_;
};

TEST_F(NcclLibraryTest, ALibraryThatIsNotThereIsNamedWithWhoAskedForIt) {
  set("TORCHFT_EXT_NCCL_LIB", "/nowhere/libnccl.so");
  const std::string text = why();
  EXPECT_NE(text.find("NCCL was not found (TORCHFT_EXT_NCCL_LIB=/nowhere/libnccl.so)"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("No such file"), std::string::npos) << text;
}

TEST_F(NcclLibraryTest, WhatALibraryLacksIsNamed) {
  set("TORCHFT_EXT_NCCL_LIB", TFT_EMPTY_NCCL);
  const std::string text = why();
  EXPECT_NE(text.find("has no ncclGetLastError, ncclGetUniqueId, ncclCommInitRankConfig"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find("ncclGetVersion"), std::string::npos) << text;
  EXPECT_EQ(text.find("ncclCommRevoke"), std::string::npos) << text;  // optional
}

TEST_F(NcclLibraryTest, OneThatIsTooOldIsRefusedWithWhatIsExpected) {
  set("TORCHFT_EXT_NCCL_LIB", TFT_STUB_NCCL);
  set("STUB_NCCL_VERSION", "21705");
  const std::string text = why();
  EXPECT_NE(text.find("NCCL 2.17.5"), std::string::npos) << text;
  EXPECT_NE(text.find("expected 2.18.1 or later"), std::string::npos) << text;
}

TEST_F(NcclLibraryTest, OneThatDoesNotTellItsVersionIsRefused) {
  set("TORCHFT_EXT_NCCL_LIB", TFT_STUB_NCCL);
  set("STUB_NCCL_VERSION", "0");
  EXPECT_NE(why().find("does not tell its version"), std::string::npos) << why();
}

TEST_F(NcclLibraryTest, AnEnvironmentThatMakesCommunicatorsBlockingIsRefused) {
  set("NCCL_COMM_BLOCKING", "");
  EXPECT_EQ(refusedNcclEnvironment(), "");
  set("NCCL_COMM_BLOCKING", "0");
  EXPECT_EQ(refusedNcclEnvironment(), "");
  stub();
  set("NCCL_COMM_BLOCKING", "1");
  EXPECT_NE(refusedNcclEnvironment().find("NCCL_COMM_BLOCKING=1"), std::string::npos);
  EXPECT_EQ(why(), refusedNcclEnvironment());
}

TEST_F(NcclLibraryTest, AnEnvironmentInWhichABlockingCallCannotBeEndedIsNamed) {
  EXPECT_EQ(refusedForBlockingCalls(), "");
  set("NCCL_ENQUEUE_REARCH_ENABLE", "0");
  set("NCCL_LAUNCH_MODE", "PARALLEL");
  EXPECT_EQ(refusedForBlockingCalls(), "");
  set("NCCL_LAUNCH_MODE", "GROUP");
  EXPECT_NE(refusedForBlockingCalls().find("NCCL_LAUNCH_MODE=GROUP"), std::string::npos);
  set("NCCL_LAUNCH_MODE", "group");
  EXPECT_NE(refusedForBlockingCalls(), "");
  set("NCCL_ENQUEUE_REARCH_ENABLE", "1");
  EXPECT_NE(refusedForBlockingCalls().find("NCCL_ENQUEUE_REARCH_ENABLE=1"), std::string::npos);
}

TEST_F(NcclLibraryTest, WhatItCanIsAQuestionOfItsVersionToo) {
  EXPECT_EQ(stub("22809")->version(), 22809);
  EXPECT_TRUE(stub("22807")->has(NcclFeature::kRevoke));
  EXPECT_FALSE(stub("22806")->has(NcclFeature::kRevoke));
  EXPECT_TRUE(stub("22304")->has(NcclFeature::kScalableInit));
  EXPECT_FALSE(stub("22303")->has(NcclFeature::kScalableInit));
  EXPECT_TRUE(stub("22602")->has(NcclFeature::kSafeAbort));
  EXPECT_FALSE(stub("22601")->has(NcclFeature::kSafeAbort));
  EXPECT_TRUE(stub("22203")->has(NcclFeature::kDeferredAbort));
  EXPECT_FALSE(stub("22202")->has(NcclFeature::kDeferredAbort));
}

TEST_F(NcclLibraryTest, CommunicatorsAreBlockingWhereThatIsAsked) {
  NcclInit init{0, 1, std::vector<NcclUniqueId>(1)};
  init.blocking = true;
  NcclComm comm = nullptr;
  EXPECT_EQ(stub()->init(&comm, init), NcclResult::kSuccess);
  EXPECT_NE(calls().find("blocking 1 share 0"), std::string::npos);
}

TEST_F(NcclLibraryTest, WhatALibraryCannotIsRefusedAndNotCalled) {
  const auto old = stub("21801");
  NcclComm comm = at<NcclComm>(9);
  EXPECT_EQ(old->revoke(comm), NcclResult::kInvalidUsage);
  EXPECT_EQ(old->init(&comm, {0, 2, std::vector<NcclUniqueId>(2)}), NcclResult::kInvalidArgument);
  EXPECT_EQ(calls(), "");
}

TEST_F(NcclLibraryTest, CommunicatorsAreNonBlockingAndShareNothing) {
  const auto api = stub();
  const std::string config =
      "config " + std::to_string(sizeof(NcclConfig)) + "/21801 blocking 0 share 0";
  NcclInit init{2, 5, std::vector<NcclUniqueId>(1)};
  EXPECT_EQ(api->getUniqueId(init.ids.data()), NcclResult::kSuccess);
  NcclComm comm = nullptr;
  EXPECT_EQ(api->init(&comm, init), NcclResult::kSuccess);
  EXPECT_EQ(comm, at<NcclComm>(77));
  EXPECT_EQ(calls(), "GetUniqueId;CommInitRankConfig 5 7 2 " + config + ";");

  init.ids.resize(3);
  init.ids.back().bytes[0] = 4;
  EXPECT_EQ(api->init(&comm, init), NcclResult::kSuccess);
  EXPECT_EQ(comm, at<NcclComm>(78));
  EXPECT_EQ(calls(), "CommInitRankScalable 5 2 3 4 " + config + ";");
  init.ids.clear();
  EXPECT_EQ(api->init(&comm, init), NcclResult::kInvalidArgument);
}

TEST_F(NcclLibraryTest, ACommunicatorIsAskedAndEnded) {
  const auto api = stub();
  const auto comm = at<NcclComm>(9);
  NcclResult state = NcclResult::kSuccess;
  EXPECT_EQ(api->asyncError(comm, &state), NcclResult::kSuccess);
  EXPECT_EQ(state, NcclResult::kRemoteError);
  EXPECT_EQ(api->lastError(comm), "its last error");
  EXPECT_EQ(api->lastError(nullptr), "");  // for which NCCL may have no text
  api->groupStart();
  api->revoke(comm);
  api->finalize(comm);
  api->destroy(comm);
  api->abort(comm);
  api->groupEnd();
  EXPECT_EQ(calls(),
            "CommGetAsyncError 9;GroupStart;CommRevoke 9 0;CommFinalize 9;CommDestroy 9;"
            "CommAbort 9;GroupEnd;");
}

TEST_F(NcclLibraryTest, EveryOperationGetsItsArgumentsInNcclsOrder) {
  const auto api = stub();
  const auto* in = at<const void*>(101);
  auto* out = at<void*>(102);
  const auto comm = at<NcclComm>(103);
  auto* stream = at<NativeStream>(104);
  const NcclType type = NcclType::kBFloat16;  // 9
  api->allReduce(in, out, 11, type, kNcclAvg, comm, stream);
  api->broadcast(in, out, 12, type, 3, comm, stream);
  api->reduce(in, out, 13, type, kNcclMax, 3, comm, stream);
  api->allGather(in, out, 14, type, comm, stream);
  api->reduceScatter(in, out, 15, type, kNcclMin, comm, stream);
  api->send(in, 16, type, 3, comm, stream);
  api->recv(out, 17, type, 3, comm, stream);
  EXPECT_EQ(calls(),
            "AllReduce 101 102 11 9 4 103 104;Broadcast 101 102 12 9 3 103 104;"
            "Reduce 101 102 13 9 2 3 103 104;AllGather 101 102 14 9 103 104;"
            "ReduceScatter 101 102 15 9 3 103 104;Send 101 16 9 3 103 104;"
            "Recv 102 17 9 3 103 104;");
}

TEST_F(NcclLibraryTest, AFactorIsReadWhereItLies) {
  const auto api = stub();
  NcclRedOp op = 0;
  api->createPreMulSum(&op, at<const void*>(5), true, NcclType::kFloat32, at<NcclComm>(9));
  EXPECT_EQ(op, 5);
  api->createPreMulSum(&op, at<const void*>(5), false, NcclType::kFloat32, at<NcclComm>(9));
  api->destroyRedOp(op, at<NcclComm>(9));
  EXPECT_EQ(calls(), "RedOpCreatePreMulSum 5 7 0 9;RedOpCreatePreMulSum 5 7 1 9;RedOpDestroy 5 9;");
}

TEST_F(NcclLibraryTest, BuffersAreRegistered) {
  const auto api = stub();
  void* handle = nullptr;
  EXPECT_EQ(api->registerBuffer(at<NcclComm>(9), at<void*>(5), 6, &handle), NcclResult::kSuccess);
  EXPECT_EQ(handle, at<void*>(81));
  api->deregisterBuffer(at<NcclComm>(9), handle);
  EXPECT_EQ(calls(), "CommRegister 9 5 6;CommDeregister 9 81;");
}

TEST_F(NcclLibraryTest, ResultsAreNcclsOwn) {
  const auto api = stub();
  set("STUB_NCCL_RESULT", "7");
  EXPECT_EQ(api->groupEnd(), NcclResult::kInProgress);
  set("STUB_NCCL_RESULT", "8");
  EXPECT_EQ(api->finalize(at<NcclComm>(9)), NcclResult::kTimeout);
  EXPECT_STREQ(toString(NcclResult::kTimeout), "timeout");
  set("STUB_NCCL_RESULT", "99");
  EXPECT_STREQ(toString(api->groupEnd()), "unknown result");
}

}  // namespace
}  // namespace torchft_ext

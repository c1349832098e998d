// The public headers for programs on libtorch: torchft_ext/torch/*.h, in a world of one. Worlds of
// several processes: examples/cpp/train.cpp, which scripts/check_package.sh runs.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "c10d/group/elastic_job.h"
#include "c10d/group/options.h"
#include "cpp/libtorch/store_server.h"
#include "cpp/support/processes.h"
#include "libtorch/group_backend.h"
#include "torchft_ext/torch/elastic.h"
#include "torchft_ext/torch/process_group.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::milliseconds kShort{300};

StorePtr prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

class LibtorchApi : public ::testing::Test {
 protected:
  LibtorchApi() : group_(makeGroup(store_, 0, 1, {.name = "alone", .engine = "host"})) {}
  ~LibtorchApi() override { shutdown(group_); }

  at::Tensor summed() {
    std::vector<at::Tensor> tensors{at::ones({3})};
    group_->allreduce(tensors)->wait();
    return tensors[0];
  }

  const StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  const ProcessGroupPtr group_;
};

TEST_F(LibtorchApi, AGroupIsMadeAbortedAndConfiguredAnew) {
  EXPECT_TRUE(summed().equal(at::ones({3})));
  EXPECT_EQ(generation(group_), 1);
  std::promise<FailurePtr> told;
  onFailure(group_, [&told](const FailurePtr& failure) { told.set_value(failure); });
  abort(group_, "enough");
  EXPECT_EQ(told.get_future().get()->cause.how, "enough");
  onFailure(group_, {});
  EXPECT_EQ(errored(group_)->kind, FailureKind::kAborted);
  EXPECT_THROW(check(group_), CommAbortedError);
  EXPECT_THROW(summed(), CommAbortedError);
  EXPECT_THROW(summed(), c10::DistBackendError);  // as torch's own backends
  configure(group_, prefixed("next", store_), 0, 1);
  EXPECT_TRUE(summed().equal(at::ones({3})));
  EXPECT_EQ(errored(group_), nullptr);
  EXPECT_EQ(stats(group_).generations, 2U);
}

TEST_F(LibtorchApi, WhatAnErrorSaysIsTheOneLineOfItsFailure) {
  abort(group_, "enough");
  try {
    check(group_);
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    EXPECT_EQ(error.what(), errored(group_)->describe());
  }
}

TEST_F(LibtorchApi, AFailureIsReturnedByTryWait) {
  std::vector<at::Tensor> tensors{at::ones({3})};
  EXPECT_EQ(tryWait(*group_->allreduce(tensors)), nullptr);
  abort(group_);
  EXPECT_EQ(tryWait(*group_->allreduce(tensors))->kind, FailureKind::kAborted);
}

TEST_F(LibtorchApi, EveryCallThatMayFailHasOneThatReturnsTheFailure) {
  const auto made = tryMakeGroup(c10::make_intrusive<c10d::HashStore>(), 0, 1, {.name = "other"});
  ASSERT_TRUE(made.group);
  EXPECT_EQ(made.failure, nullptr);
  EXPECT_EQ(tryCheck(made.group), nullptr);
  const auto part = trySplit(made.group, {0});
  ASSERT_TRUE(part.group);
  EXPECT_EQ(part.failure, nullptr);
  shutdown(part.group);

  abort(made.group, "enough");
  EXPECT_EQ(tryCheck(made.group)->cause.how, "enough");
  EXPECT_EQ(trySplit(made.group, {0}).failure->cause.how, "enough");
  EXPECT_FALSE(trySplit(made.group, {0}).group);
  EXPECT_TRUE(tryConfigure(made.group, "127.0.0.1:1/x", 0, 1, kShort));
  EXPECT_EQ(tryConfigure(made.group, prefixed("late", store_), 0, 2, kShort)->kind,
            FailureKind::kTimeout);
  shutdown(made.group);
}

TEST_F(LibtorchApi, AGroupThatCannotBeMadeIsNoGroupAndAFailure) {
  const auto made = tryMakeGroup(store_, 0, 2, {.name = "lonely", .timeout = kShort});
  EXPECT_FALSE(made.group);
  ASSERT_TRUE(made.failure);
  EXPECT_EQ(made.failure->kind, FailureKind::kTimeout);
}

TEST_F(LibtorchApi, OptionsForDevicesReachTheGroup) {
  const auto group = makeGroup(
      prefixed("devices", store_), 0, 1,
      {.engine = "host", .poison = true, .high_priority_stream = true, .blocking_wait = true});
  const auto options = group->getBackend(c10::DeviceType::CPU)->getBackendOptions();
  const auto* found = dynamic_cast<const FtOptions*>(options.get());
  ASSERT_NE(found, nullptr);
  EXPECT_TRUE(found->poison && found->high_priority_stream && found->blocking_wait);
  shutdown(group);
}

TEST_F(LibtorchApi, BadArgumentsAreRefused) {
  EXPECT_THROW(makeGroup({}, 0, 1), c10::ValueError);
  EXPECT_THROW(makeGroup(store_, 1, 1), c10::ValueError);
  EXPECT_THROW(makeGroup(store_, 0, 1, {.device = c10::Device(c10::kCUDA)}), c10::ValueError);
  EXPECT_THROW(makeGroup(store_, 0, 65537), c10::ValueError);
  for (const auto timeout : {std::chrono::milliseconds(0), std::chrono::milliseconds(-1)}) {
    EXPECT_THROW(makeGroup(store_, 0, 1, {.timeout = timeout}), c10::ValueError);
    EXPECT_THROW(makeUnformedGroup(store_, {.timeout = timeout}), c10::ValueError);
    EXPECT_THROW(elastic::makeLocalGroup({.timeout = timeout}), c10::ValueError);
    EXPECT_THROW(configure(group_, store_, 0, 1, timeout), c10::ValueError);
    EXPECT_THROW(check(group_, timeout), c10::ValueError);
  }
  EXPECT_THROW(makeGroup(store_, 0, 1, {.heartbeat = std::chrono::milliseconds(-1)}),
               c10::ValueError);
  EXPECT_THROW(configure(group_, StorePtr(), 0, 1), c10::ValueError);
  EXPECT_THROW(configure(group_, store_, 2, 2), c10::ValueError);
  EXPECT_THROW(configure(group_, "no address", 0, 1), c10::ValueError);
  EXPECT_THROW(setTimeout(group_, std::chrono::milliseconds(-1)), c10::ValueError);
  EXPECT_THROW(errored({}), std::invalid_argument);
  const auto foreign = c10::make_intrusive<c10d::ProcessGroup>(store_, 0, 1);
  EXPECT_THROW(errored(foreign), std::invalid_argument);
  summed();  // nothing has come of it
}

TEST_F(LibtorchApi, ASplitInheritsTheOptions) {
  setTimeout(group_, std::chrono::seconds(77));
  const ProcessGroupPtr part = split(group_, {0});
  ASSERT_TRUE(part);
  const auto options = part->getBackend(c10::DeviceType::CPU)->getBackendOptions();
  EXPECT_EQ(options->timeout, std::chrono::seconds(77));
  shutdown(part);
}

TEST_F(LibtorchApi, APublishedGroupIsFoundByItsName) {
  EXPECT_FALSE(findGroup("published"));
  publish(group_, "published");
  EXPECT_EQ(findGroup("published").get(), group_.get());
  EXPECT_THROW(publish(group_, "published"), std::invalid_argument);
}

TEST_F(LibtorchApi, WhatGroupsHaveRecordedIsDumped) {
  const std::string path = ::testing::TempDir() + "dump_" + std::to_string(::getpid()) + ".json";
  dump(path);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  EXPECT_NE(text.str().find("\"group\": \"alone\""), std::string::npos) << text.str();
}

#ifdef TFT_PYTHON
TEST(LibtorchAdoption, PythonAdoptsAGroupOfCppsAndCppFindsThoseOfPython) {
  const Meeting meeting;
  Processes ranks;
  for (const char* rank : {"0", "1"}) {
    ranks.start({TFT_PYTHON, TFT_ADOPTION_PY, TFT_ADOPTION, meeting.port(), rank, "2"});
  }
  EXPECT_TRUE(ranks.endWell(Deadline::after(std::chrono::seconds(180))));
}
#endif

TEST(LibtorchElastic, AJobNeedsAPlaceToMeet) {
  EXPECT_THROW(elastic::Job::join({.address = "", .size = 1}), c10::ValueError);
  EXPECT_THROW(elastic::Job::join({.address = "h:1/j", .size = 0}), c10::ValueError);
  EXPECT_THROW(elastic::Job::join({.address = "h:1/j", .size = 65537}), c10::ValueError);
  for (const auto time : {std::chrono::milliseconds(0), std::chrono::milliseconds(-1)}) {
    EXPECT_THROW(elastic::Job::join({.address = "h:1/j", .limit = time}), c10::ValueError);
    EXPECT_THROW(elastic::Job::join({.address = "h:1/j", .timeout = time}), c10::ValueError);
  }
}

TEST(LibtorchElastic, AManagedGroupHasTheJobsNetworkWhereItHasChosenNone) {
  const Meeting meeting;
  const auto job = elastic::Job::join({.address = "127.0.0.1:" + meeting.port() + "/limit",
                                       .limit = kShort,
                                       .interface = "127.0.0.1"});
  const auto group = elastic::makeLocalGroup({.engine = "host"});
  const auto choosy =
      elastic::makeLocalGroup({.engine = "host", .heartbeat = std::chrono::seconds(7)});
  job->manage("default", group);
  job->manage("choosy", choosy);
  job->recover();
  EXPECT_EQ(backendOf("test", group)->engine()->frozenAfter(), kShort);
  EXPECT_EQ(backendOf("test", choosy)->engine()->frozenAfter(), std::chrono::seconds(7));
  job->leave();
}

TEST(LibtorchElastic, WhoAsksHearsOfStepsAndOfHowTheViewCameToBe) {
  const Meeting meeting;
  ElasticJobOptions asked;
  asked.address = "127.0.0.1:" + meeting.port() + "/steps";
  const auto job = elastic::Job::join({.address = asked.address, .interface = "127.0.0.1"});
  job->recover();
  job->countSteps(811);
  job->countSteps(812);
  const JobState state = ElasticJob::inquire(asked, std::chrono::seconds(10));
  ASSERT_TRUE(state.report && state.report->steps);
  EXPECT_EQ(state.report->steps->committed, 812U);
  EXPECT_GT(state.report->steps->per_second, 0);
  ASSERT_EQ(state.report->changes.size(), 1U);
  const auto& phases = state.report->changes.front().phases;
  ASSERT_EQ(phases.size(), 2U);
  EXPECT_EQ(phases[0].first, "agree");
  EXPECT_EQ(phases[1].first, "connect");
  job->leave();
}

TEST(LibtorchElastic, TheSourceIsTheLowestRankThatWasThere) {
  elastic::View view;
  view.continuing = {false, true, true};
  EXPECT_EQ(view.source(), 1);
  EXPECT_FALSE(view.allContinue());
  view.continuing = {false, false};
  EXPECT_EQ(view.source(), 0);
}

}  // namespace
}  // namespace torchft_ext

// torchft_ext/torch/elastic.h between members: several in this process, without groups, and in
// processes of their own with one. More of these: mixed_test.cpp and examples/cpp.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/libtorch/store_server.h"
#include "cpp/support/processes.h"
#include "torchft_ext/torch/elastic.h"

namespace torchft_ext {
namespace {

using elastic::Answer;
using elastic::Digest;
using elastic::Job;
using elastic::JoinOptions;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kByTheJob{0};

using JobPtr = std::shared_ptr<Job>;

template <typename Do>
auto inThread(Do act) {
  return std::async(std::launch::async, std::move(act));
}

// Of a call that throws one.
template <typename Call>
ElasticErrorKind kindOf(Call call) {
  try {
    call();
  } catch (const ElasticError& error) {
    return error.kind();
  }
  throw std::logic_error("expected an ElasticError");
}

class LibtorchJob : public testing::Test {
 protected:
  JoinOptions options(int size) const {
    JoinOptions options;
    options.address = "127.0.0.1:" + meeting_.port() + "/job";
    options.size = size;
    options.min_size = 1;
    options.limit = seconds(1);
    options.timeout = seconds(60);
    options.interface = "127.0.0.1";
    return options;
  }

  // All of them join, form the first view, and are in the order of its ranks.
  static std::vector<JobPtr> found(const std::vector<JoinOptions>& all) {
    std::vector<std::future<std::pair<int, JobPtr>>> coming;
    coming.reserve(all.size());
    for (const JoinOptions& options : all) {
      coming.push_back(inThread([options] {
        const JobPtr job = Job::join(options);
        return std::pair(job->recover().rank, job);
      }));
    }
    std::vector<JobPtr> jobs(all.size());
    for (auto& one : coming) {
      const auto [rank, job] = one.get();
      jobs.at(static_cast<size_t>(rank)) = job;
    }
    return jobs;
  }
  std::vector<JobPtr> found(int size) const {
    return found(std::vector(static_cast<size_t>(size), options(size)));
  }

  static std::vector<Answer> agree(const std::vector<JobPtr>& members,
                                   const std::vector<Digest>& digests, size_t says_last) {
    std::vector<std::future<Answer>> voting;
    voting.reserve(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      voting.push_back(inThread([job = members[i], digest = digests.at(i), i, says_last] {
        return job->agree(true, "note " + std::to_string(i), kByTheJob, digest, i == says_last);
      }));
    }
    std::vector<Answer> answers;
    answers.reserve(voting.size());
    for (auto& one : voting) answers.push_back(one.get());
    return answers;
  }

  static void leaveAll(const std::vector<JobPtr>& members) {
    std::vector<std::future<bool>> leaving;
    leaving.reserve(members.size());
    for (const JobPtr& job : members) {
      leaving.push_back(inThread([job] { return job->leave(); }));
    }
    for (auto& one : leaving) EXPECT_TRUE(one.get());
  }

  const Meeting meeting_;
};

constexpr size_t kNobody = 1000;

TEST_F(LibtorchJob, NotesAndTheWordOfTheEndComeToAllMembers) {
  const auto members = found(2);
  for (const Answer& answer : agree(members, {{}, {}}, /*says_last=*/1)) {
    EXPECT_TRUE(answer.ok && answer.last);
    EXPECT_EQ(answer.notes, (std::vector<std::string>{"note 0", "note 1"}));
  }
  for (const Answer& answer : agree(members, {{}, {}}, kNobody)) EXPECT_FALSE(answer.last);
  leaveAll(members);
}

TEST_F(LibtorchJob, DigestsThatDifferAreNotOkOnAllMembers) {
  const auto members = found(2);
  for (const Answer& answer : agree(members, {{.common = "a"}, {.common = "b"}}, kNobody)) {
    EXPECT_TRUE(!answer.ok && answer.diverged);
  }
  const std::vector<Digest> of_shards{{.shard = 0, .of_shard = "a"}, {.shard = 1, .of_shard = "b"}};
  for (const Answer& answer : agree(members, of_shards, kNobody)) EXPECT_TRUE(answer.ok);
  leaveAll(members);
}

TEST_F(LibtorchJob, WhoComesAfterTheEndIsToldWhenAndByHowMany) {
  const auto before = std::chrono::system_clock::now() - seconds(1);
  const auto members = found(2);
  EXPECT_TRUE(members[0]->end());
  leaveAll(members);
  try {
    Job::join(options(2));
    FAIL() << "expected that the job is over";
  } catch (const JobOverError& error) {
    EXPECT_EQ(error.kind(), ElasticErrorKind::kJobOver);
    EXPECT_EQ(error.members(), 2);
    EXPECT_GE(error.endedAt(), before);
    EXPECT_LE(error.endedAt(), std::chrono::system_clock::now());
  }
}

TEST_F(LibtorchJob, AStepTimeoutHasToBePositive) {
  JoinOptions wrong = options(1);
  wrong.step_timeout = milliseconds(0);
  EXPECT_THROW(Job::join(wrong), c10::ValueError);
}

// ---- processes

// Two of that program, each of which ends well if what it has seen is right.
void expectTwoEndWell(const std::string& what) {
  const Meeting meeting;
  Processes both;
  for (int i = 0; i < 2; ++i) both.start({TFT_MIXED, what, meeting.port()});
  EXPECT_TRUE(both.endWell(Deadline::after(seconds(100))));
}

TEST_F(LibtorchJob, WhoLeavesReleasesMembersThatWaitForIt) {
  expectTwoEndWell("leaves");
}

TEST_F(LibtorchJob, AStepTimeoutEndsAgreeAndLeavesTheAbsentOut) {
  expectTwoEndWell("absent");
}

TEST_F(LibtorchJob, AStepTimeoutBoundsOperationsOfManagedGroups) {
  expectTwoEndWell("slow");
}

// ---- without a store

std::vector<std::string> addressesOfThisProcess(size_t count) {
  constexpr int kFirst = 12000;  // the system gives nobody a port there that asks for any
  constexpr int kOfAProcess = 4;
  std::vector<std::string> addresses;
  for (size_t i = 0; i < count; ++i) {
    const int port = kFirst + getpid() % 2500 * kOfAProcess + static_cast<int>(i);
    addresses.push_back("127.0.0.1:" + std::to_string(port));
  }
  return addresses;
}

std::vector<JoinOptions> listedOptions() {
  const std::vector<std::string> addresses = addressesOfThisProcess(2);
  std::vector<JoinOptions> all;
  for (const std::string& listen : addresses) {
    JoinOptions one;
    one.size = 2;
    one.limit = seconds(1);
    one.timeout = seconds(30);
    one.members = addresses;
    one.listen = listen;
    one.key = "the job's key";
    all.push_back(one);
  }
  return all;
}

TEST_F(LibtorchJob, MembersThatAreListedNeedNoStore) {
  const auto members = found(listedOptions());
  for (const Answer& answer : agree(members, {{}, {}}, kNobody)) EXPECT_TRUE(answer.ok);
  EXPECT_FALSE(members[0]->end());  // it has nowhere to be recorded
  leaveAll(members);
}

TEST_F(LibtorchJob, WhoHasAnotherKeyFindsNobody) {
  auto all = listedOptions();
  all[1].key = "another";
  for (JoinOptions& one : all) one.timeout = seconds(2);
  std::vector<std::future<ElasticErrorKind>> coming;
  coming.reserve(all.size());
  for (const JoinOptions& one : all) {
    coming.push_back(inThread([one] { return kindOf([&] { Job::join(one); }); }));
  }
  for (auto& one : coming) EXPECT_EQ(one.get(), ElasticErrorKind::kTimeout);
}

}  // namespace
}  // namespace torchft_ext

// Operations that wait long, over every way that a host engine's members talk: who is named.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "cpp/comm/cluster.h"
#include "cpp/support/captured_log.h"
#include "cpp/support/wait_for.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kAsk{50};
constexpr std::chrono::seconds kLimit{2};

struct Way {
  std::string name;
  bool local_sockets;
  bool shared_memory;
  size_t items;  // above small_bytes: a ring
};

class LongWait : public ::testing::TestWithParam<Way> {
 protected:
  static constexpr int kSize = 3;

  LongWait() {
    HostEngineOptions options = loopbackOptions();
    options.local_sockets = GetParam().local_sockets;
    options.shared_memory = GetParam().shared_memory;
    options.tuning.direct_world = 1;
    const auto data = std::make_shared<MemoryStore>();
    for (int i = 0; i < kSize; ++i) {
      members_.push_back(std::make_unique<ClusterMember>(std::to_string(i), data, options));
      values_.emplace_back(GetParam().items, 1.0F);
      group(i).setAskAfter(kAsk);
    }
    form("wait");
  }

  // Returns once the engine is out of the values.
  void TearDown() override {
    for (int i = 0; i < kSize; ++i) group(i).abort("the test is over");
  }

  void form(const std::string& prefix) {
    Cluster::on({0, 1, 2}, [this, &prefix](int i) {
      EXPECT_EQ(members_[static_cast<size_t>(i)]->configure(prefix, i, kSize), nullptr);
    });
  }

  Group& group(int i) { return *members_[static_cast<size_t>(i)]->group; }
  std::vector<float>& values(int i) { return values_[static_cast<size_t>(i)]; }
  std::shared_ptr<OpState> issue(int i, Operation operation, Duration timeout = kTestLimit) {
    operation.timeout = timeout;
    return group(i).issue(std::move(operation));
  }
  std::shared_ptr<OpState> allreduce(int i, Duration timeout = kTestLimit) {
    return issue(i, allreduceOf(values(i)), timeout);
  }
  void everybodyReduces() {
    std::vector<std::shared_ptr<OpState>> states;
    for (int i = 0; i < kSize; ++i) states.push_back(allreduce(i));
    for (const auto& state : states) EXPECT_EQ(finish(state), nullptr);
  }
  // Waits as a caller would until it is known whom it waits for.
  static std::string whomItWaitsFor(const std::shared_ptr<OpState>& op) {
    const bool known = waitFor([&op] {
      op->wait(Deadline::after(milliseconds(10)));
      return op->done() || !op->waitedFor().value_or("").empty();
    });
    EXPECT_TRUE(known);
    return op->waitedFor().value_or("");
  }

  const CapturedLog captured_;
  std::vector<std::unique_ptr<ClusterMember>> members_;
  std::vector<std::vector<float>> values_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_P(LongWait, NamesTheRankThatIssuedOneFewerOnAllThatWait) {
  everybodyReduces();
  const std::vector<std::shared_ptr<OpState>> waiting{allreduce(0), allreduce(1)};
  for (const auto& op : waiting) {
    const std::string whom = whomItWaitsFor(op);
    EXPECT_TRUE(contains(whom, "rank 2 (host ")) << whom;
    EXPECT_TRUE(contains(whom, "): its last operation is allreduce #1, ")) << whom;
    EXPECT_FALSE(contains(whom, "rank 0") || contains(whom, "rank 1")) << whom;
  }
  EXPECT_TRUE(CapturedLog::contains("allreduce #2 on 'test' (rank 0/3, generation 1) has waited "));
  const auto last = allreduce(2);  // which ends nothing but the wait
  for (const auto& op : {waiting[0], waiting[1], last}) EXPECT_EQ(finish(op), nullptr);
  EXPECT_TRUE(waitFor([&] { return group(0).stats().waited_for[2] > kAsk; }));
  EXPECT_EQ(group(0).stats().waited_for[1], Duration::zero());
}

TEST_P(LongWait, ATimeoutNamesWhoHasNotIssuedIt) {
  const auto op = allreduce(0, kLimit);
  const auto neighbour = allreduce(1);
  const FailurePtr failure = finish(op);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout);
  const std::string text = failure->describe();
  EXPECT_TRUE(contains(text, "did not complete within 2 s: it waited for rank 2 (host ")) << text;
  EXPECT_TRUE(contains(text, "): it has issued no operation")) << text;
  EXPECT_FALSE(contains(text, "rank 1")) << text;
  EXPECT_TRUE(contains(finish(neighbour)->describe(), "it waited for rank 2 (host "));
}

TEST_P(LongWait, TwoThatWaitForEachOthersRootAreNamedWithTheirOperations) {
  Operation broadcast;
  broadcast.kind = OpKind::kBroadcast;
  broadcast.dtype = DType::kFloat;
  broadcast.outputs = {bufferOf(values(0))};
  broadcast.root = 1;
  const auto zero = issue(0, broadcast);
  broadcast.outputs = {bufferOf(values(1))};
  broadcast.root = 0;
  const auto one = issue(1, broadcast);
  const std::string whom = whomItWaitsFor(zero);
  EXPECT_TRUE(contains(whom, "rank 1 (host ")) << whom;
  EXPECT_TRUE(contains(whom, "): it issued broadcast #1 of root 0 in its place, ")) << whom;
  EXPECT_FALSE(one->done());
}

TEST_P(LongWait, AReceiveNamesItsSender) {
  const auto op = issue(0, recvOf(values(0), 2));
  const auto other = issue(1, recvOf(values(1), 0));
  EXPECT_TRUE(contains(whomItWaitsFor(op), "rank 2 (host "));
  const std::string whom = whomItWaitsFor(other);
  EXPECT_TRUE(contains(whom, "rank 0 (host ")) << whom;
  EXPECT_TRUE(contains(whom, "): its last operation is recv #1, ")) << whom;
}

TEST_P(LongWait, NobodyIsAskedWhereTheGroupDoesNotWantIt) {
  for (int i = 0; i < kSize; ++i) group(i).setAskAfter(Duration::zero());
  form("silent");
  const auto op = allreduce(0, milliseconds(300));
  const auto neighbour = allreduce(1);
  const FailurePtr failure = finish(op);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(op->waitedFor(), std::nullopt);
  EXPECT_EQ(failure->cause.how, "allreduce #1 did not complete within 0.3 s");
  EXPECT_EQ(group(0).stats().waited_for, std::vector<Duration>(kSize, Duration::zero()));
}

constexpr size_t kFew = 10;
constexpr size_t kMany = 100000;
INSTANTIATE_TEST_SUITE_P(Ways, LongWait,
                         ::testing::Values(Way{"sharedMemory", true, true, kFew},
                                           Way{"unixTree", true, false, kFew},
                                           Way{"unixRing", true, false, kMany},
                                           Way{"tcpTree", false, false, kFew},
                                           Way{"tcpRing", false, false, kMany}),
                         [](const auto& way) { return way.param.name; });

}  // namespace
}  // namespace torchft_ext

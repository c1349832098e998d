// A generation's secret, against real engines: who does not know it does not get in, is told so,
// and keeps nobody else out.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "cpp/comm/cluster.h"
#include "cpp/support/net_support.h"
#include "membership/records.h"

namespace torchft_ext {
namespace {

using net_test::RawPeer;

// Sees rosters when, and as, the test wants: false keeps one back.
using SeeRoster = std::function<bool(std::string* roster)>;

class RosterFilter : public StoreClient {
 public:
  RosterFilter(std::unique_ptr<StoreClient> inner, SeeRoster see)
      : inner_(std::move(inner)), see_(std::move(see)) {}
  void set(const std::string& key, const std::string& value) override { inner_->set(key, value); }
  void remove(const std::string& key) override { inner_->remove(key); }
  std::optional<std::vector<std::string>> getAll(const std::vector<std::string>& keys) override {
    auto values = inner_->getAll(keys);
    for (size_t i = 0; values && i < keys.size(); ++i) {
      const bool roster = keys[i].find("/go/") != std::string::npos;
      if (roster && !see_(&(*values)[i])) return std::nullopt;
    }
    return values;
  }

 private:
  const std::unique_ptr<StoreClient> inner_;
  const SeeRoster see_;
};

void filterRosters(Cluster& cluster, int member, const SeeRoster& see) {
  cluster.members[static_cast<size_t>(member)]->store = std::make_shared<StoreThread>(
      "memory:filtered",
      [data = cluster.data, see] { return std::make_unique<RosterFilter>(data->client(), see); });
}

void expectSum(Cluster& cluster) {
  cluster.onAll([&](int i) {
    std::vector<float> values(100, static_cast<float>(i + 1));
    const FailurePtr failure = finish(cluster.group(i).issue(allreduceOf(values)));
    ASSERT_EQ(failure, nullptr) << failure->describe();
    EXPECT_EQ(values.back(), 3.0F);
  });
}

template <typename T>
std::optional<T> await(Cluster& cluster, const std::string& key,
                       std::optional<T> (*decode)(std::string_view)) {
  std::optional<T> found;
  waitFor([&] {
    found = decode(cluster.data->peek(key).value_or(""));
    return found.has_value();
  });
  return found;
}

// Says hello to rank 0 as rank 1, with everything right but the proof; what rank 0 answers.
std::optional<RefusalCode> answerToAStranger(Cluster& cluster, const std::string& prefix,
                                             uint8_t channel) {
  const auto acceptor = await(cluster, prefix + "/0", &decodeRecord);
  const auto member = await(cluster, prefix + "/1", &decodeRecord);
  if (!acceptor || !member) return std::nullopt;
  const auto go = await(cluster, prefix + "/go/" + member->token.hex(), &decodeGo);
  if (!go) return std::nullopt;
  Hello hello;
  hello.nonce = go->roster.nonce;
  hello.proof = GenerationSecret::random().connector;
  hello.from = member->incarnation;
  hello.to = acceptor->incarnation;
  hello.rank = 1;
  hello.channel = channel;
  RawPeer peer(acceptor->addresses.front());
  peer.say(encodeHello(hello));
  const std::string answer = peer.readToEnd();
  if (answer.size() < kFrameHeaderBytes) return std::nullopt;
  const auto refusal = decodeRefusal(std::string_view(answer).substr(kFrameHeaderBytes));
  return refusal ? std::optional(refusal->code) : std::nullopt;
}

TEST(GroupSecret, AStrangerThatKnowsTheNonceIsRefusedAndTheGenerationFormsWithItsMember) {
  Cluster cluster(2);
  std::atomic<bool> member_may_come{false};
  filterRosters(cluster, 1, [&](std::string*) { return member_may_come.load(); });
  std::thread stranger([&] {
    for (uint8_t channel = 0; channel < 2; ++channel)
      EXPECT_EQ(answerToAStranger(cluster, "next", channel), RefusalCode::kWrongSecret);
    member_may_come = true;
  });
  cluster.form({0, 1}, "next");
  stranger.join();
  expectSum(cluster);
  cluster.form({0, 1}, "after");
  expectSum(cluster);
}

TEST(GroupSecret, AMemberWithTheWrongSecretIsToldSoAndTheNextConfigureWorks) {
  Cluster cluster(2);
  std::atomic<bool> wrong{true};
  filterRosters(cluster, 1, [&](std::string* bytes) {
    auto go = decodeGo(*bytes);
    if (!wrong || !go) return true;
    go->roster.secret = GenerationSecret::random();
    *bytes = encodeGo(go->token, go->roster);
    return true;
  });
  Cluster::on({0, 1}, [&](int i) {
    const FailurePtr failure =
        cluster.members[static_cast<size_t>(i)]->configure("next", i, 2, std::chrono::seconds(20));
    ASSERT_NE(failure, nullptr);
    EXPECT_EQ(failure->op, "configure");
    EXPECT_NE(failure->describe().find("secret"), std::string::npos) << failure->describe();
  });
  wrong = false;
  cluster.form({0, 1}, "next");
  expectSum(cluster);
}

}  // namespace
}  // namespace torchft_ext

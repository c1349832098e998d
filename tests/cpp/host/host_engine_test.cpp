// What is said where ports are taken.
#include "host/host_engine.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "cpp/comm/cluster.h"
#include "liveness/peer_monitor.h"

namespace torchft_ext {
namespace {

class PortTaken : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string error;
    taken_ = listenOn(loopbackOptions().bind_address, {}, &error);
    ASSERT_TRUE(taken_) << error;
  }
  PortRange itself() const { return {taken_->address.port(), taken_->address.port()}; }
  std::string refusal() const {
    return "cannot listen on 127.0.0.1, port " + std::to_string(itself().first) +
           ": Address already in use";
  }

 private:
  std::optional<ListeningSocket> taken_;
};

TEST_F(PortTaken, EngineSaysWhichAndWhatToDo) {
  HostEngineOptions options = loopbackOptions();
  options.ports = itself();
  const auto made = makeHostEngineForTest(options);
  const auto* failure = std::get_if<Failure>(&made);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->describe(),
            refusal() + "; choose another interface or port range; make a new group");
}

TEST_F(PortTaken, EngineThatCouldNotOpenIsNoneToStop) {
  HostEngineOptions options = loopbackOptions();
  const auto good = hostEngine(options);
  EXPECT_TRUE(std::holds_alternative<std::shared_ptr<Engine>>(good));
  options.ports = itself();
  EXPECT_TRUE(std::holds_alternative<Failure>(hostEngine(options)));
  EXPECT_TRUE(stopHostEngines(Deadline::after(kTestLimit)));
}

TEST(HostEngines, GroupsThatBeginAtOnceShareOne) {
  constexpr int kGroups = 4;
  std::vector<std::shared_ptr<Engine>> engines(kGroups);
  std::vector<std::thread> threads;
  threads.reserve(kGroups);
  for (auto& engine : engines) {
    threads.emplace_back(
        [&engine] { engine = std::get<std::shared_ptr<Engine>>(hostEngine(loopbackOptions())); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& engine : engines) EXPECT_EQ(engine, engines.front());
  engines.clear();
  EXPECT_TRUE(stopHostEngines(Deadline::after(kTestLimit)));
}

TEST_F(PortTaken, MonitorSaysSoOnceThoughBothItsListenersNeedOne) {
  MonitorOptions options;
  options.bind_address = loopbackOptions().bind_address;
  options.ports = itself();
  std::string error;
  EXPECT_EQ(PeerMonitor::start(options, &error), nullptr);
  EXPECT_EQ(error, refusal());
}

}  // namespace
}  // namespace torchft_ext

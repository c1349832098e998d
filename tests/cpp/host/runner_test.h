// The runners of all ranks of a generation, on one loop, and the operations that their tests issue.
#pragma once

#include <gtest/gtest.h>

#include "cpp/host/connection_support.h"
#include "cpp/host/schedule_support.h"
#include "host/schedule_runner.h"

namespace torchft_ext {

// Small chunks, so that every collective is many frames.
constexpr ScheduleTuning kSmallChunks{4096, 256, 4};

// With real connections between them.
class RunnerTest : public ::testing::Test {
 protected:
  struct Rank {
    std::vector<std::shared_ptr<Connection>> connections;
    std::unique_ptr<ScheduleRunner> runner;
    std::vector<Failure> failures;
    std::vector<int> left;
    std::vector<std::pair<int, bool>> broken;  // peer, clean
  };

  void connect(int size, const ScheduleTuning& tuning = kSmallChunks, int buffer_bytes = 0) {
    ranks.resize(static_cast<size_t>(size));
    for (Rank& rank : ranks) rank.connections.resize(ranks.size());
    for (size_t a = 0; a < ranks.size(); ++a) {
      for (size_t b = a + 1; b < ranks.size(); ++b) {
        SocketPair pair = tcpPair(buffer_bytes);
        test.on([&] {
          ranks[a].connections[b] =
              makeStreamConnection(test.loop(), std::move(pair.first), std::make_shared<Traffic>());
          ranks[b].connections[a] = makeStreamConnection(test.loop(), std::move(pair.second),
                                                         std::make_shared<Traffic>());
        });
      }
    }
    test.on([&] {
      for (size_t rank = 0; rank < ranks.size(); ++rank) makeRunner(static_cast<int>(rank), tuning);
    });
  }

  void makeRunner(int index, const ScheduleTuning& tuning) {
    Rank& rank = at(index);
    std::vector<Connection*> connections;
    for (const auto& connection : rank.connections) connections.push_back(connection.get());
    ScheduleRunner::Callbacks callbacks;
    callbacks.failed = [&rank](Failure failure) { rank.failures.push_back(std::move(failure)); };
    callbacks.broken = [&rank](int peer, const std::string&, bool clean) {
      rank.broken.emplace_back(peer, clean);
    };
    callbacks.left = [&rank](int peer, const FrameHeader&) { rank.left.push_back(peer); };
    rank.runner = std::make_unique<ScheduleRunner>(
        test.loop(), index, static_cast<int>(ranks.size()), connections, tuning, callbacks);
  }

  void TearDown() override {
    test.on([&] {
      for (Rank& rank : ranks) {
        if (rank.runner) rank.runner->cancelAll();
      }
      for (Rank& rank : ranks) {
        rank.connections.clear();
        rank.runner.reset();
      }
    });
  }

  Rank& at(int rank) { return ranks[static_cast<size_t>(rank)]; }

  std::shared_ptr<OpState> stateOf(int rank, OpKind kind) {
    GenerationIdentity identity{"dp0", 1, rank, static_cast<int>(ranks.size())};
    return std::make_shared<OpState>(std::make_shared<Lifecycle>(identity), kind, 42,
                                     kTestPatience);
  }
  std::shared_ptr<OpState> issue(int rank, Operation operation) {
    auto state = stateOf(rank, operation.kind);
    test.on([&] { at(rank).runner->add(state, std::move(operation)); });
    return state;
  }
  void expectSuccess(const std::vector<std::shared_ptr<OpState>>& states) {
    for (const auto& state : states) {
      ASSERT_TRUE(state->wait(testDeadline()));
      EXPECT_EQ(state->failure(), nullptr);
    }
  }
  // The one failure of a rank, once it has it.
  Failure failureOf(int rank) {
    EXPECT_TRUE(test.eventually([&] { return at(rank).failures.size() == 1; }));
    Failure failure;
    test.on([&] {
      if (!at(rank).failures.empty()) failure = at(rank).failures[0];
    });
    return failure;
  }

  TestLoop test;
  std::vector<Rank> ranks;
};

inline Operation allreduceOf(std::vector<float>& items, ReduceKind op = ReduceKind::kSum) {
  Operation operation;
  operation.kind = OpKind::kAllreduce;
  operation.dtype = DType::kFloat;
  operation.reduce = op;
  operation.outputs = {bufferOf(items)};
  return operation;
}

inline Operation broadcastOf(std::vector<float>& items, int root) {
  Operation operation = allreduceOf(items);
  operation.kind = OpKind::kBroadcast;
  operation.root = root;
  return operation;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace torchft_ext

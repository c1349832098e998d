// Several members in one process: an engine, a group and a thread each, over real sockets and one
// store in memory.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "cpp/membership/memory_store.h"
#include "host/host_engine.h"

namespace torchft_ext {

inline constexpr Duration kTestLimit = std::chrono::seconds(60);  // hit only when something hangs

inline HostEngineOptions loopbackOptions() {
  HostEngineOptions options;
  options.bind_address = *SocketAddress::fromNumeric("127.0.0.1", 0);
  return options;
}

// Another engine around a member's host engine.
using WrapEngine = std::function<std::shared_ptr<Engine>(std::shared_ptr<Engine>)>;

class ClusterMember {
 public:
  ClusterMember(const std::string& name, const std::shared_ptr<MemoryStore>& data,
                const HostEngineOptions& options, const WrapEngine& wrap = nullptr)
      : engine(std::get<std::shared_ptr<Engine>>(makeHostEngineForTest(options))),
        store(std::make_shared<StoreThread>("memory:" + name, [data] { return data->client(); })),
        group(std::make_unique<Group>("test", wrap ? wrap(engine) : engine,
                                      std::make_shared<Watchdog>(), kTestLimit)) {}

  FailurePtr configure(const std::string& prefix, int rank, int size,
                       Duration timeout = kTestLimit) {
    return group->configure(store, prefix, rank, size, timeout);
  }

  std::shared_ptr<Engine> engine;
  std::shared_ptr<StoreThread> store;
  std::unique_ptr<Group> group;
};

class Cluster {
 public:
  explicit Cluster(int size, const HostEngineOptions& options = loopbackOptions(),
                   const WrapEngine& wrap = nullptr)
      : data(std::make_shared<MemoryStore>()) {
    for (int i = 0; i < size; ++i) {
      HostEngineOptions own = options;
      // so that some connections of a world are local and some are TCP
      own.local_sockets = i % 2 == 0;
      members.push_back(std::make_unique<ClusterMember>(std::to_string(i), data, own, wrap));
    }
  }

  // body(member index) on a thread each, all joined.
  void onAll(const std::function<void(int)>& body) { on(all(), body); }
  static void on(const std::vector<int>& which, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    threads.reserve(which.size());
    for (int i : which) threads.emplace_back([&body, i] { body(i); });
    for (auto& thread : threads) thread.join();
  }
  // The listed members form a generation, in that order of ranks.
  void form(const std::vector<int>& which, const std::string& prefix) {
    std::vector<FailurePtr> failures(which.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < which.size(); ++rank) {
      threads.emplace_back([&, rank] {
        failures[rank] = members[static_cast<size_t>(which[rank])]->configure(
            prefix, static_cast<int>(rank), static_cast<int>(which.size()));
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& failure : failures) ASSERT_EQ(failure, nullptr) << failure->describe();
  }
  std::vector<int> all() const {
    std::vector<int> which;
    for (size_t i = 0; i < members.size(); ++i) which.push_back(static_cast<int>(i));
    return which;
  }
  Group& group(int i) { return *members[static_cast<size_t>(i)]->group; }

  std::shared_ptr<MemoryStore> data;
  std::vector<std::unique_ptr<ClusterMember>> members;
};

// ---- operations on vectors; the caller keeps the vector until the state is done

template <typename T>
DType dtypeOf();
template <>
inline DType dtypeOf<float>() {
  return DType::kFloat;
}
template <>
inline DType dtypeOf<int64_t>() {
  return DType::kInt64;
}

template <typename T>
Buffer bufferOf(std::vector<T>& values) {
  return {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(T)};
}

template <typename T>
Operation allreduceOf(std::vector<T>& values, ReduceKind reduce = ReduceKind::kSum) {
  Operation operation;
  operation.kind = OpKind::kAllreduce;
  operation.dtype = dtypeOf<T>();
  operation.reduce = reduce;
  operation.outputs = {bufferOf(values)};
  return operation;
}

template <typename T>
Operation sendOf(std::vector<T>& values, int peer, uint64_t tag = 0) {
  Operation operation;
  operation.kind = OpKind::kSend;
  operation.dtype = dtypeOf<T>();
  operation.peer = peer;
  operation.tag = tag;
  operation.inputs = {bufferOf(values)};
  return operation;
}

template <typename T>
Operation recvOf(std::vector<T>& values, int peer, uint64_t tag = 0) {
  Operation operation;
  operation.kind = OpKind::kRecv;
  operation.dtype = dtypeOf<T>();
  operation.peer = peer;
  operation.tag = tag;
  operation.outputs = {bufferOf(values)};
  return operation;
}

inline FailurePtr finish(const std::shared_ptr<OpState>& state) {
  EXPECT_TRUE(state->wait(Deadline::after(kTestLimit))) << "an operation hangs";
  return state->failure();
}

}  // namespace torchft_ext

// What a c10d group adds to the engine, at world 1, where an operation has nothing to wait for.
//   backend_call PORT CALLS
// Sums of one float in turn: by the engine (torchft_ext::Comm), by the group. Prints one line for
// each, "engine SECONDS..." and "group SECONDS...": each call with its wait().
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "torchft_ext/comm.h"
#include "torchft_ext/torch/process_group.h"

namespace {

using torchft_ext::DataType;
using torchft_ext::Reduction;

constexpr int kBlock = 100;  // calls of one kind between those of the other

void time(std::vector<double>& seconds, const std::function<void()>& call) {
  for (int i = 0; i < kBlock; ++i) {
    const auto began = std::chrono::steady_clock::now();
    call();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
}

void print(const char* name, const std::vector<double>& seconds) {
  std::printf("%s", name);
  for (double each : seconds) std::printf(" %.9f", each);
  std::printf("\n");
}

void run(const std::vector<std::string>& words) {
  torchft_ext::Comm comm;
  comm.configure(torchft_ext::makeMemoryStore(), "engine", 0, 1);
  float value = 1;

  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(words.at(0)));
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto group =
      torchft_ext::makeGroup(c10::make_intrusive<c10d::PrefixStore>("group", store), 0, 1);
  std::vector<at::Tensor> tensors{at::ones({1})};

  std::vector<double> engine;
  std::vector<double> backend;
  const auto calls = static_cast<size_t>(std::stoi(words.at(1)));
  const auto by_engine = [&] {
    comm.allreduce(&value, 1, DataType::kFloat32, Reduction::kSum).wait();
  };
  const auto by_group = [&] { group->allreduce(tensors)->wait(); };
  for (bool warm : {false, true}) {
    if (warm) {
      engine.clear();
      backend.clear();
    }
    while (engine.size() < (warm ? calls : kBlock)) {
      time(engine, by_engine);
      time(backend, by_group);
    }
  }
  print("engine", engine);
  print("group", backend);
  torchft_ext::shutdown(group);
  comm.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "backend_call: %s\n", error.what());
    return 1;
  }
}

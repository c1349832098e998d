// One rank of ddp_step.py: steps of C++'s DistributedDataParallel, without Python.
//   ddp_step PORT PREFIX RANK SIZE STEPS WARM_UP
// Rank 0 prints the seconds of each step, one a line.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "torchft_ext/torch/ddp.h"

namespace {

constexpr int kLayers = 8;
constexpr int64_t kWidth = 256;
constexpr int64_t kBatch = 32;

torch::nn::Sequential makeNetwork() {
  torch::nn::Sequential network;
  for (int i = 0; i < kLayers; ++i) {
    network->push_back(torch::nn::Linear(kWidth, kWidth));
    network->push_back(torch::nn::ReLU());
  }
  return network;
}

void run(const std::vector<std::string>& words) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(words.at(0)));
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const int rank = std::stoi(words.at(2));
  const auto group = torchft_ext::makeGroup(
      c10::make_intrusive<c10d::PrefixStore>(words.at(1), store), rank, std::stoi(words.at(3)));
  auto network = makeNetwork();
  torchft_ext::DistributedDataParallel ddp(network, group);
  const at::Tensor x = at::ones({kBatch, kWidth});
  const int warm_up = std::stoi(words.at(5));
  const int steps = std::stoi(words.at(4)) + warm_up;
  for (int step = 0; step < steps; ++step) {
    const auto began = std::chrono::steady_clock::now();
    network->zero_grad();
    ddp.forward([&] { return network->forward(x); }).square().mean().backward();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    if (rank == 0 && step >= warm_up) std::printf("%.9f\n", took.count());
  }
  torchft_ext::shutdown(group);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ddp_step: %s\n", error.what());
    return 1;
  }
}

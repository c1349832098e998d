// torchft_ext/torch/ddp.h, with ranks as processes: ddp_rank/.
#include "torchft_ext/torch/ddp.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "processes.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLimit{180};

class Meeting {
 public:
  Meeting() {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.waitWorkers = false;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  std::string port() const { return std::to_string(store_->getPort()); }

 private:
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

ProcessGroupPtr alone() {
  return makeGroup(c10::make_intrusive<c10d::HashStore>(), 0, 1, {.engine = "host"});
}

TEST(CppDdp, EveryTensorOfAnOutputIsFoundAndTheOutputIsGivenBack) {
  const auto group = alone();
  const torch::nn::Linear net(2, 2);
  DistributedDataParallel ddp(net, group, {.find_unused_parameters = true});
  const auto output = ddp.forward([&] {
    const at::Tensor y = torch::nn::Linear(net)(at::ones({1, 2}));
    return std::make_tuple(y, std::vector<at::Tensor>{y * 2}, std::map<int, at::Tensor>{{7, y}}, 3);
  });
  EXPECT_EQ(std::get<3>(output), 3);
  std::get<1>(output).front().sum().backward();
  EXPECT_TRUE(net->bias.grad().equal(at::full({2}, 2.0F)));
  shutdown(group);
}

TEST(CppDdp, WithoutGradientsItOnlyCalls) {
  const auto group = alone();
  const torch::nn::Linear net(2, 2);
  DistributedDataParallel ddp(net, group);
  shutdown(group);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(ddp.forward([] { return 5; }), 5);
}

TEST(CppDdp, BadArgumentsAreRefused) {
  const auto group = alone();
  const torch::nn::Linear net(2, 2);
  EXPECT_THROW(DistributedDataParallel(net, ProcessGroupPtr()), std::invalid_argument);
  EXPECT_THROW(DistributedDataParallel(std::shared_ptr<torch::nn::Module>(), group),
               c10::ValueError);
  EXPECT_THROW(DistributedDataParallel(net, group, {.bucket_bytes = 0}), c10::ValueError);
  for (at::Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
  EXPECT_THROW(DistributedDataParallel(net, group), c10::ValueError);
  shutdown(group);
}

TEST(CppDdp, GradientsAreTheMeanWhileMembersDieAndComeAndAnOldBackwardThrows) {
  const Meeting meeting;
  Processes survivors;
  Processes victim;
  for (const char* number : {"0", "1", "2", "3"}) {
    (*number == '2' ? victim : survivors).start({TFT_DDP_RANK, "members", meeting.port(), number});
  }
  EXPECT_TRUE(survivors.endWell(Deadline::after(kLimit)));
}

#ifdef TFT_PYTHON

constexpr int kSize = 3;

std::string bytesOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Of all ranks, one after the other.
std::string gradientsBy(const std::vector<std::string>& program, const std::string& variant) {
  const Meeting meeting;
  const std::string directory =
      ::testing::TempDir() + "ddp_" + std::to_string(::getpid()) + "_" + variant;
  std::filesystem::create_directories(directory);
  Processes ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    std::vector<std::string> words = program;
    const std::string number = std::to_string(rank);
    for (const std::string& word :
         {meeting.port(), number, std::to_string(kSize), variant, directory + "/" + number}) {
      words.push_back(word);
    }
    ranks.start(words);
  }
  EXPECT_TRUE(ranks.endWell(Deadline::after(kLimit)));
  std::string all;
  for (int rank = 0; rank < kSize; ++rank) all += bytesOf(directory + "/" + std::to_string(rank));
  std::filesystem::remove_all(directory);
  return all;
}

class CppDdpAndPythons : public ::testing::TestWithParam<const char*> {};

TEST_P(CppDdpAndPythons, GradientsAndBuffersAreBitByBitTheSame) {
  const std::string ours = gradientsBy({TFT_DDP_RANK, "gradients"}, GetParam());
  const std::string pythons = gradientsBy({TFT_PYTHON, TFT_DDP_RANK_PY}, GetParam());
  EXPECT_GT(ours.size(), 5U * kSize * 4U * 1000U);
  EXPECT_TRUE(ours == pythons);
}

INSTANTIATE_TEST_SUITE_P(Variants, CppDdpAndPythons,
                         ::testing::Values("one_bucket", "many", "unused", "views"),
                         [](const auto& variant) { return std::string(variant.param); });

#endif

}  // namespace
}  // namespace torchft_ext

// torchft_ext/torch/ddp.h, with ranks as processes: ddp_rank/.
#include "torchft_ext/torch/ddp.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cpp/libtorch/store_server.h"
#include "cpp/support/processes.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLimit{180};

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
constexpr std::array<const char*, 4> kVariants{"one_bucket", "many", "unused", "views"};

struct Directory {
  explicit Directory(const char* name)
      : path(::testing::TempDir() + name + std::to_string(::getpid())) {
    std::filesystem::create_directories(path);
  }
  ~Directory() { std::filesystem::remove_all(path); }
  // What all ranks have written, one after the other.
  std::string bytesOf(const std::string& variant) const {
    std::string all;
    for (int rank = 0; rank < kSize; ++rank) {
      std::ifstream file(path + "/" + variant + std::to_string(rank), std::ios::binary);
      all.append(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return all;
  }
  const std::string path;
};

void train(const std::vector<std::string>& program, const Directory& directory) {
  const Meeting meeting;
  Processes ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    std::vector<std::string> words = program;
    for (const std::string& word :
         {meeting.port(), std::to_string(rank), std::to_string(kSize), directory.path}) {
      words.push_back(word);
    }
    words.insert(words.end(), kVariants.begin(), kVariants.end());
    ranks.start(words);
  }
  EXPECT_TRUE(ranks.endWell(Deadline::after(kLimit)));
}

TEST(CppDdp, GradientsAndBuffersAreThoseOfPythonBitByBit) {
  const Directory ours("ddp_cpp");
  const Directory pythons("ddp_python");
  train({TFT_DDP_RANK, "gradients"}, ours);
  train({TFT_PYTHON, TFT_DDP_RANK_PY}, pythons);
  for (const char* variant : kVariants) {
    const std::string bytes = ours.bytesOf(variant);
    EXPECT_GT(bytes.size(), 5U * kSize * 4U * 1000U) << variant;
    EXPECT_TRUE(bytes == pythons.bytesOf(variant)) << variant;
  }
}

#endif

}  // namespace
}  // namespace torchft_ext

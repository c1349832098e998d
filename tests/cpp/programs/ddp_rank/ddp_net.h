// The model and the data of ddp_rank_main.cpp and ddp_rank.py, which compute the same in both
// languages: numbers are small fractions, so that nothing depends on a generator.
#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <string>

namespace torchft_ext {

// [n] of count, -9/50 to 9/50.
inline at::Tensor pattern(int64_t count, int64_t shift, int64_t factor) {
  return at::arange(count, at::kLong)
      .mul(factor)
      .add(shift)
      .remainder(19)
      .sub(9)
      .to(at::kFloat)
      .div(50);
}

struct DdpNet : torch::nn::Module {
  explicit DdpNet(bool skips) : skips_(skips) {
    first = register_module("first", torch::nn::Linear(6, 30));
    second = register_module("second", torch::nn::Linear(30, 30));
    sometimes = register_module("sometimes", torch::nn::Linear(30, 30));
    norm = register_module("norm", torch::nn::BatchNorm1d(30));
    last = register_module("last", torch::nn::Linear(30, 3));
    const at::NoGradGuard no_grad;
    int64_t shift = 0;
    for (const auto& parameter : named_parameters()) {
      const at::Tensor values = pattern(parameter.value().numel(), shift++, 37);
      parameter.value().copy_(values.view_as(parameter.value()));
    }
  }

  // One layer is left out in every third step, where it may be.
  at::Tensor forward(const at::Tensor& x, int64_t step) {
    at::Tensor y = at::relu(second(at::relu(first(x))));
    if (!skips_ || step % 3 != 0) y = y + sometimes(y);
    return last(norm(y));
  }

  torch::nn::Linear first{nullptr}, second{nullptr}, sometimes{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};

 private:
  const bool skips_;
};

inline at::Tensor batch(int64_t step, int64_t rank) {
  return pattern(8 * 6, 7 * step + 3 * rank, 13).mul(4).view({8, 6});
}

}  // namespace torchft_ext

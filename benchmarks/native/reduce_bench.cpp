// The engine's loops that add up what ranks send (host/reduce.h), beside ATen's kernels, on one
// thread: for each type and reduction the rate at which the result is made. With Google Benchmark:
//   reduce_bench --benchmark_filter=float32/sum --benchmark_format=json
#include <ATen/Parallel.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>
#include <benchmark/benchmark.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "host/reduce.h"

namespace {

using torchft_ext::DType;
using torchft_ext::ReduceKind;

struct Type {
  DType ours;
  at::ScalarType atens;
};
constexpr std::array kTypes{
    Type{DType::kFloat, at::kFloat}, Type{DType::kDouble, at::kDouble},
    Type{DType::kHalf, at::kHalf},   Type{DType::kBFloat16, at::kBFloat16},
    Type{DType::kInt8, at::kChar},   Type{DType::kInt16, at::kShort},
    Type{DType::kInt32, at::kInt},   Type{DType::kInt64, at::kLong},
    Type{DType::kUint8, at::kByte},  Type{DType::kBool, at::kBool},
};
constexpr std::array kReductions{ReduceKind::kSum, ReduceKind::kProduct, ReduceKind::kMin,
                                 ReduceKind::kMax};
constexpr std::array<int64_t, 2> kBytes{32 << 10, 512 << 10};

at::Tensor tensorOf(const Type& type, int64_t bytes) {
  const auto items = bytes / static_cast<int64_t>(torchft_ext::itemSize(type.ours));
  return at::ones({items}, at::TensorOptions(type.atens));
}

void byAten(at::Tensor& into, const at::Tensor& from, ReduceKind kind) {
  switch (kind) {
    case ReduceKind::kSum:
      into.add_(from);
      break;
    case ReduceKind::kProduct:
      into.mul_(from);
      break;
    case ReduceKind::kMin:
      at::minimum_out(into, into, from);
      break;
    default:
      at::maximum_out(into, into, from);
  }
}

void reduce(benchmark::State& state, bool aten, Type type, ReduceKind kind, int64_t bytes) {
  at::Tensor into = tensorOf(type, bytes);
  const at::Tensor from = tensorOf(type, bytes);
  auto* to = static_cast<uint8_t*>(into.data_ptr());
  const auto* source = static_cast<const uint8_t*>(from.data_ptr());
  for (auto _ : state) {
    if (aten) {
      byAten(into, from, kind);
    } else {
      torchft_ext::reduceInto(to, source, static_cast<size_t>(bytes), type.ours, kind);
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * bytes);
}

void registerAll() {
  for (const Type& type : kTypes) {
    for (ReduceKind kind : kReductions) {
      for (int64_t bytes : kBytes) {
        for (bool aten : {false, true}) {
          const std::string name = std::string(torchft_ext::toString(type.ours)) + "/" +
                                   torchft_ext::toString(kind) + "/" + std::to_string(bytes) +
                                   (aten ? "/aten" : "/ft");
          benchmark::RegisterBenchmark(name.c_str(), reduce, aten, type, kind, bytes);
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  registerAll();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

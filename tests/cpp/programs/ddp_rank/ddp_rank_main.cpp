// One rank of tests of C++'s DistributedDataParallel, without Python:
//   torchft_ext_ddp_rank gradients PORT RANK SIZE DIRECTORY VARIANT...
//     writes what each step computed, to DIRECTORY/VARIANT+RANK
//   torchft_ext_ddp_rank members PORT NUMBER [SIMULATOR]
//     0 to 2 found the group; 2 dies in its third step; 3 takes its place. With the library of the
//     simulated device (tests/sim) they train on that, a device for each
// Exit status 0: what it looked at is right.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "cpp/programs/ddp_rank/ddp_net.h"
#include "torchft_ext/torch/ddp.h"

namespace torchft_ext {
namespace {

using Net = std::shared_ptr<DdpNet>;

void require(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what);
}

StorePtr storeAt(const std::string& port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(port));
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

StorePtr prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

DdpOptions optionsOf(const std::string& variant) {
  DdpOptions options;
  if (variant != "one_bucket") options.bucket_bytes = 2048;
  options.find_unused_parameters = variant == "unused";
  options.gradient_as_bucket_view = variant == "views";
  return options;
}

at::Tensor lossOf(DistributedDataParallel& ddp, const Net& net, int64_t step, int64_t rank,
                  c10::Device device = c10::kCPU) {
  const at::Tensor input = batch(step, rank).to(device);
  return ddp.forward([&] { return net->forward(input, step); }).square().mean();
}

// A synchronised step; every other one adds up two batches.
void backward(DistributedDataParallel& ddp, const Net& net, int64_t step, int64_t rank,
              c10::Device device = c10::kCPU) {
  net->zero_grad();
  if (step % 2 == 1) {
    const NoSyncGuard no_sync = ddp.noSync();
    lossOf(ddp, net, step + 100, rank, device).backward();
  }
  lossOf(ddp, net, step, rank, device).backward();
}

void descend(const Net& net) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : net->parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad().mul(0.125));
  }
}

void write(std::ofstream& file, const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.contiguous();
  file.write(static_cast<const char*>(bytes.const_data_ptr()),
             static_cast<std::streamsize>(bytes.nbytes()));
}

void writeVariant(const ProcessGroupPtr& group, const std::string& variant,
                  const std::string& path) {
  const auto net = std::make_shared<DdpNet>(variant == "unused");
  DistributedDataParallel ddp(net, group, optionsOf(variant));
  std::ofstream file(path, std::ios::binary);
  for (int64_t step = 0; step < 5; ++step) {
    backward(ddp, net, step, group->getRank());
    for (const at::Tensor& parameter : net->parameters()) {
      if (parameter.grad().defined()) write(file, parameter.grad());
    }
    for (const at::Tensor& buffer : net->buffers()) write(file, buffer);
    descend(net);
  }
}

void writeGradients(const std::vector<std::string>& words) {
  const auto group =
      makeGroup(storeAt(words.at(0)), std::stoi(words.at(1)), std::stoi(words.at(2)));
  for (size_t i = 4; i < words.size(); ++i) {
    writeVariant(group, words[i], words.at(3) + "/" + words[i] + words.at(1));
  }
  shutdown(group);
}

// ---- the simulated device

template <typename Result>
Result callSimulator(const char* name) {
  const std::string full = std::string("torchft_ext_sim::") + name;
  return c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), "").typed<Result()>().call();
}

c10::Device simulatedDevice(const std::string& library, int number) {
  require(::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr, "no simulator: " + library);
  callSimulator<void>("install");
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const c10::Device device(guard.type(),
                           static_cast<c10::DeviceIndex>(number % guard.deviceCount()));
  guard.setDevice(device);
  return device;
}

// As Module::to(), which knows no other devices than CUDA's: Tensor::set_data() refuses them.
void move(DdpNet& net, c10::Device device) {
  std::vector<at::Tensor> tensors = net.parameters();
  for (const at::Tensor& buffer : net.buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor there = tensor.detach().to(device);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(there.getIntrusivePtr());
  }
}

// ---- members come and go

class Member {
 public:
  Member(StorePtr store, int number, c10::Device device)
      : store_(std::move(store)),
        number_(number),
        device_(device),
        net_(makeNet(device)),
        group_(makeGroup(c10::make_intrusive<c10d::HashStore>(), 0, 1)),
        ddp_(net_, group_, optionsOf("many")) {}

  void run() {
    if (number_ < 3) {
      begin("1", number_, 3);
      for (int step = 0; step < 2; ++step) train(step);
      loseTheLast();
    }
    begin("2", number_ == 3 ? 2 : number_, 3);
    bringUpToDate();
    for (int step = 2; step < 5; ++step) train(step);
    const at::Tensor loss = lossOf(5);
    group_->barrier()->wait();  // none is in forward() when the next generation begins
    begin("3", rank(), 3);
    refuseOld(loss);
    for (int step = 5; step < 7; ++step) train(step);
    shutdown(group_);
    if (device_.is_cpu()) return;
    const auto report = callSimulator<std::string>("report");
    require(report.find("\"violations\": []") != std::string::npos, report);
  }

 private:
  static Net makeNet(c10::Device device) {
    auto net = std::make_shared<DdpNet>(false);
    if (!device.is_cpu()) move(*net, device);
    return net;
  }

  int rank() const { return group_->getRank(); }

  at::Tensor lossOf(int64_t step) { return torchft_ext::lossOf(ddp_, net_, step, rank(), device_); }

  // On a device backward() goes on before the sums are there, and whether they came is told here.
  void settle() {
    if (!device_.is_cpu()) check(group_);
  }

  void begin(const std::string& prefix, int rank, int size) {
    configure(group_, prefixed(prefix, store_), rank, size);
  }

  void train(int step) {
    const auto expected = meanGradients(step);
    backward(ddp_, net_, step, rank(), device_);
    settle();
    const auto parameters = net_->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      require(parameters[i].grad().cpu().allclose(expected[i], 1e-4, 1e-6),
              "gradients of step " + std::to_string(step) + " are not the mean");
    }
    descend(net_);
    evaluateAlone(step);
  }

  // On one rank: the others' next forward() must not wait for it.
  void evaluateAlone(int64_t step) {
    const at::NoGradGuard no_grad;
    if (rank() == 0) lossOf(step);
  }

  // As one process computes them that has all ranks' data.
  std::vector<at::Tensor> meanGradients(int64_t step) const {
    DdpNet alone(false);
    {
      const at::NoGradGuard no_grad;
      const auto from = net_->parameters();
      const auto to = alone.parameters();
      for (size_t i = 0; i < from.size(); ++i) at::Tensor(to[i]).copy_(from[i]);
    }
    const int size = group_->getSize();
    for (int rank = 0; rank < size; ++rank) {
      if (step % 2 == 1) {
        alone.forward(batch(step + 100, rank), step).square().mean().div(size).backward();
      }
      alone.forward(batch(step, rank), step).square().mean().div(size).backward();
    }
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : alone.parameters()) gradients.push_back(parameter.grad());
    return gradients;
  }

  void loseTheLast() {
    try {
      group_->barrier()->wait();  // all have ended the step before
      const at::Tensor loss = lossOf(2);
      if (number_ == 2) ::raise(SIGKILL);  // slow ones may be in the barrier or in forward() yet
      loss.backward();
      settle();
    } catch (const PeerLostError& error) {
      require(error.failure().cause.rank == 2,
              "another rank was lost: " + std::string(error.what()));
      return;
    }
    throw std::runtime_error("backward() took no notice of a lost rank");
  }

  void bringUpToDate() {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : net_->parameters()) {
      std::vector<at::Tensor> one{parameter.detach()};
      group_->broadcast(one)->wait();
    }
    settle();
  }

  void refuseOld(const at::Tensor& loss) {
    try {
      loss.backward();
    } catch (const CommAbortedError& error) {
      const std::string text = error.what();
      require(text.find("forward() ran in generation 3") != std::string::npos ||
                  text.find("forward() ran in generation 2") != std::string::npos,
              text);
      return;
    }
    throw std::runtime_error("an older generation's backward() went on");
  }

  const StorePtr store_;
  const int number_;
  const c10::Device device_;
  const Net net_;
  const ProcessGroupPtr group_;
  DistributedDataParallel ddp_;
};

}  // namespace
}  // namespace torchft_ext

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.at(0) == "gradients") {
      torchft_ext::writeGradients({words.begin() + 1, words.end()});
    } else {
      const int number = std::stoi(words.at(2));
      const c10::Device device =
          words.size() > 3 ? torchft_ext::simulatedDevice(words[3], number) : c10::kCPU;
      torchft_ext::Member(torchft_ext::storeAt(words.at(1)), number, device).run();
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "ddp_rank: " << error.what() << "\n";
    return 1;
  }
}

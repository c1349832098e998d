// C++ in a process of Python's, for adoption.py: it makes groups that Python adopts, and finds
// those that Python has made.
#include <torch/library.h>

#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "torchft_ext/torch/process_group.h"

namespace torchft_ext {
namespace {

using Groups = std::map<std::string, ProcessGroupPtr>;

// By name; torch's registry keeps none alive.
Groups& published() {
  static auto* const groups = new Groups;
  return *groups;
}

StorePtr storeAt(int64_t port, const std::string& prefix) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::PrefixStore>(
      prefix, c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
}

void makeAndPublish(const std::string& name, int64_t port, int64_t rank, int64_t size) {
  auto group = makeGroup(storeAt(port, name), static_cast<int>(rank), static_cast<int>(size));
  publish(group, name);
  published()[name] = std::move(group);
}

void configureAnew(const std::string& name, int64_t port, int64_t rank, int64_t size) {
  const ProcessGroupPtr group = published().at(name);
  const std::string place = name + "/" + std::to_string(generation(group) + 1);
  configure(group, storeAt(port, place), static_cast<int>(rank), static_cast<int>(size));
}

void end(const std::string& name) {
  shutdown(published().at(name));
  published().erase(name);
}

int64_t sizeOf(const std::string& name) {  // 0: no such group of this library
  const ProcessGroupPtr group = findGroup(name);
  return group ? group->getSize() : 0;
}

void sum(const std::string& name, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  findGroup(name)->allreduce(tensors)->wait();
}

TORCH_LIBRARY(torchft_ext_adoption, m) {
  m.def("publish(str name, int port, int rank, int size) -> ()", makeAndPublish);
  m.def("configure(str name, int port, int rank, int size) -> ()", configureAnew);
  m.def("end(str name) -> ()", end);
  m.def("size_of(str name) -> int", [](const std::string& name) { return sizeOf(name); });
  m.def("sum(str name, Tensor(a!) tensor) -> ()", sum);
}

}  // namespace
}  // namespace torchft_ext

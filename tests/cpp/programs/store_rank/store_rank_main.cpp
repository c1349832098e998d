// One of many processes without Python that form groups over torch's TCPStore, world after world,
// as store_worlds_test.cpp asks: each world is made anew, by the ranks below its size.
//   usage: torchft_ext_store_rank PORT RANK SIZE...
// What it took goes to the store under took/SIZE/RANK, in microseconds.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "c10d/group/group_making.h"
#include "host/process.h"

namespace torchft_ext {
namespace {

constexpr std::chrono::seconds kLimit{60};

using Store = c10::intrusive_ptr<c10d::TCPStore>;

// All come before anyone goes on.
void meet(const Store& store, const std::string& where, int size) {
  const std::string go = where + "/go";
  if (store->add(where + "/come", 1) == size) store->set(go, std::vector<uint8_t>{1});
  store->wait({go}, kLimit);
}

void formWorld(const Store& store, int rank, int size) {
  const std::string name = "world" + std::to_string(size);
  GroupSpec spec;
  spec.store = c10::make_intrusive<c10d::PrefixStore>(name, store);
  spec.engine = "host";
  spec.rank = rank;
  spec.size = size;
  spec.name = name;
  spec.options = c10::make_intrusive<FtOptions>(kLimit);
  meet(store, "begin/" + name, size);
  const auto began = Clock::now();
  const auto backend = makeBackend(spec);
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began);
  const std::string text = std::to_string(took.count());
  store->set("took/" + std::to_string(size) + "/" + std::to_string(rank),
             std::vector<uint8_t>(text.begin(), text.end()));
  backend->barrier({})->wait();
  meet(store, "end/" + name, size);
  backend->shutdown();
}

void run(int argc, char** argv) {
  const int rank = std::atoi(argv[2]);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::atoi(argv[1]));
  options.waitWorkers = false;
  options.timeout = kLimit;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const std::vector<int> sizes = [&] {
    std::vector<int> all;
    for (int i = 3; i < argc; ++i) all.push_back(std::atoi(argv[i]));
    return all;
  }();
  // Who connects later may hold up the server for seconds, and so the world that forms meanwhile.
  meet(store, "connected", *std::max_element(sizes.begin(), sizes.end()));
  for (const int size : sizes) {
    if (rank < size) formWorld(store, rank, size);
  }
}

}  // namespace
}  // namespace torchft_ext

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: torchft_ext_store_rank PORT RANK SIZE...\n";
    return 2;
  }
  torchft_ext::run(argc, argv);
  torchft_ext::processExit(torchft_ext::Deadline::after(std::chrono::seconds(2)));
  return 0;
}

// Loads the NCCL that TORCHFT_EXT_NCCL_LIB names, as the engine does, and makes the calls that need
// no GPU. Prints a line of what it is; fails where it is not what csrc/nccl takes it for. On a
// machine with a GPU it also makes a communicator of one rank, and aborts it.
//   real_library VERSION     as ncclGetVersion() tells it: 22809
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <string>
#include <thread>

#include "nccl/nccl_library.h"

namespace torchft_ext {
namespace {

bool failed = false;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::cerr << "expected: " << what << "\n";
  failed = true;
}

struct Brought {
  NcclFeature feature;
  const char* name;
  int by;
};
constexpr Brought kFeatures[] = {
    {NcclFeature::kScalableInit, "scalable", 22304},        {NcclFeature::kFloat8, "float8", 22403},
    {NcclFeature::kSafeAbort, "safe abort", 22602},         {NcclFeature::kRevoke, "revoke", 22807},
    {NcclFeature::kDeferredAbort, "deferred abort", 22203},
};

std::string features(const NcclApi& api) {
  std::string all;
  for (const Brought& brought : kFeatures) {
    const bool has = api.has(brought.feature);
    expect(has == (api.version() >= brought.by),
           std::string(brought.name) + " since " + std::to_string(brought.by));
    if (has) all += std::string(all.empty() ? "" : ", ") + brought.name;
  }
  return all;
}

void uniqueIds(NcclApi& api) {
  NcclUniqueId one;
  NcclUniqueId other;
  expect(api.getUniqueId(&one) == NcclResult::kSuccess, "an id");
  expect(api.getUniqueId(&other) == NcclResult::kSuccess, "a second id");
  expect(one.bytes != NcclUniqueId{}.bytes && one.bytes != other.bytes, "ids that differ");
}

size_t entriesOf(const char* directory) {
  const std::filesystem::directory_iterator all(directory);
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// Behind an id are a thread and a listener, until its ranks have come or it is released.
void releasedRoots(NcclApi& api) {
  const size_t threads = entriesOf("/proc/self/task");
  const size_t descriptors = entriesOf("/proc/self/fd");
  NcclUniqueId id;
  expect(api.getUniqueId(&id) == NcclResult::kSuccess, "an id to give up");
  expect(entriesOf("/proc/self/task") == threads + 1, "a thread behind an id");
  api.releaseRoot(id);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (entriesOf("/proc/self/task") > threads && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  expect(entriesOf("/proc/self/task") == threads, "no thread behind a released id");
  const size_t left = entriesOf("/proc/self/fd") - descriptors;
  // Later ones leave the connection's.
  expect(left <= (api.version() < 23000 ? 0 : 1), "no descriptor behind a released id");
}

void refusals(NcclApi& api) {
  NcclResult state = NcclResult::kSuccess;
  expect(api.asyncError(nullptr, &state) == NcclResult::kInvalidArgument, "no state of no one");
  expect(api.lastError(nullptr).size() > 0, "a text for the last error");
  expect(api.abort(nullptr) == NcclResult::kSuccess, "that nothing can be aborted");
  expect(api.groupStart() == NcclResult::kSuccess, "a group begun");
  expect(api.groupEnd() == NcclResult::kSuccess, "a group ended");
  float number = 0;
  expect(api.allReduce(&number, &number, 1, NcclType::kFloat32, kNcclSum, nullptr, nullptr) ==
             NcclResult::kInvalidArgument,
         "no sum of no one");
}

// The state of a communicator of one rank, once NCCL knows it; it takes a second where there is a
// GPU.
std::string oneRank(NcclApi& api) {
  NcclInit init;
  init.ids.resize(1);
  expect(api.getUniqueId(init.ids.data()) == NcclResult::kSuccess, "an id for one rank");
  NcclComm comm = nullptr;
  NcclResult state = api.init(&comm, init);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (state == NcclResult::kInProgress && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (api.asyncError(comm, &state) != NcclResult::kSuccess) break;
  }
  expect(state == NcclResult::kSuccess || state == NcclResult::kUnhandledCudaError,
         std::string("one rank, or no CUDA; got ") + toString(state));
  if (state != NcclResult::kSuccess) return std::string("one rank: ") + toString(state);
  expect(api.abort(comm) == NcclResult::kSuccess, "the one rank aborted");
  return "one rank: made and aborted";
}

int run(const std::string& version) {
  const auto loaded = loadNcclLibrary();
  if (const std::string* why = std::get_if<std::string>(&loaded)) {
    std::cerr << *why << "\n";
    return 1;
  }
  NcclApi& api = *std::get<std::shared_ptr<NcclApi>>(loaded);
  expect(std::to_string(api.version()) == version, "version " + version);
  const std::string has = features(api);
  uniqueIds(api);
  releasedRoots(api);
  refusals(api);
  std::cout << "NCCL " << api.version() << ": " << has << "; " << oneRank(api) << std::endl;
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace torchft_ext

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: real_library VERSION, as in 22809\n";
    return 2;
  }
  const int status = torchft_ext::run(arguments[1]);
  std::_Exit(status);  // NCCL's own threads may go on
}

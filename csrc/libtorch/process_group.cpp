#include "torchft_ext/torch/process_group.h"

#include <stdexcept>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "c10d/adapter/arguments.h"
#include "c10d/group/environment.h"
#include "c10d/group/group_making.h"
#include "c10d/store/store_adapter.h"
#include "c10d/work/comm_error.h"
#include "comm/public_stats.h"
#include "libtorch/group_backend.h"

namespace torchft_ext {
namespace {

using Milliseconds = std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<FtBackend>;

c10::intrusive_ptr<FtOptions> optionsOf(const char* caller, const GroupOptions& given) {
  TORCH_CHECK_VALUE(given.timeout.count() > 0, caller,
                    ": timeout: expected a positive time, found ", given.timeout.count(), " ms");
  auto options = c10::make_intrusive<FtOptions>(given.timeout);
  options->interface = given.interface;
  options->port_range = given.port_range;
  options->local_sockets = given.local_sockets;
  options->heartbeat = given.heartbeat;
  if (given.ask_after) checkAskAfter(std::string(caller) + ": ask_after", *given.ask_after);
  options->ask_after = given.ask_after;
  options->nan_check = given.nan_check;
  options->poison = given.poison;
  options->high_priority_stream = given.high_priority_stream;
  options->blocking_wait = given.blocking_wait;
  options->staged = given.staged;
  return options;
}

ProcessGroupPtr make(const StorePtr& store, int rank, int size, const GroupOptions& options,
                     bool begin) {
  TORCH_CHECK_VALUE(store, "makeGroup: store: expected a store, found null");
  TORCH_CHECK_VALUE(!options.device || options.device->has_index(),
                    "makeGroup: device: expected one with an index, found ",
                    options.device.value_or(c10::kCPU));
  GroupSpec spec;
  spec.store = c10::make_intrusive<c10d::PrefixStore>(options.name, store);
  spec.rank = rank;
  spec.size = size;
  spec.engine = options.engine;
  spec.name = options.name;
  spec.caller = "makeGroup";
  spec.options = optionsOf("makeGroup", options);
  spec.bound_device = options.device;
  spec.begin = begin;
  ProcessGroupPtr group = makeGroup(spec);
  group->setBoundDeviceId(options.device);
  return group;
}

template <typename Call>
FailurePtr failureOf(const Call& call) {
  try {
    call();
    return nullptr;
  } catch (const CommError& error) {
    return error.shared();
  }
}

template <typename Call>
GroupOrFailure groupOrFailure(const Call& call) {
  GroupOrFailure made;
  made.failure = failureOf([&] { made.group = call(); });
  return made;
}

void checkTimeout(const std::optional<Milliseconds>& timeout) {
  TORCH_CHECK_VALUE(!timeout || timeout->count() > 0,
                    "configure: timeout: expected a positive time, found ",
                    timeout.value_or(Milliseconds(0)).count(), " ms");
}

}  // namespace

ProcessGroupPtr makeGroup(const StorePtr& store, int rank, int size, const GroupOptions& options) {
  return make(store, rank, size, options, true);
}

GroupOrFailure tryMakeGroup(const StorePtr& store, int rank, int size,
                            const GroupOptions& options) {
  return groupOrFailure([&] { return makeGroup(store, rank, size, options); });
}

ProcessGroupPtr makeUnformedGroup(const StorePtr& store, const GroupOptions& options) {
  return make(store, 0, 1, options, false);
}

FailurePtr tryConfigure(const ProcessGroupPtr& group, const StorePtr& store, int rank, int size,
                        std::optional<Milliseconds> timeout) {
  const BackendPtr backend = backendOf("configure", group);
  TORCH_CHECK_VALUE(store, "configure: store: expected a store, found null");
  checkSize({"configure", "size"}, size);
  checkRank({"configure", "rank"}, rank, size);
  checkTimeout(timeout);
  const StorePlace place = storePlaceOf(store);
  return backend->tryForm({place.thread, place.prefix}, rank, size, timeout);
}

void configure(const ProcessGroupPtr& group, const StorePtr& store, int rank, int size,
               std::optional<Milliseconds> timeout) {
  if (const FailurePtr failure = tryConfigure(group, store, rank, size, timeout)) {
    throwFailure(failure);
  }
}

void configure(const ProcessGroupPtr& group, const std::string& store_address, int rank, int size,
               std::optional<Milliseconds> timeout) {
  backendOf("configure", group)->configure(store_address, rank, size, timeout);
}

FailurePtr tryConfigure(const ProcessGroupPtr& group, const std::string& store_address, int rank,
                        int size, std::optional<Milliseconds> timeout) {
  return failureOf([&] { configure(group, store_address, rank, size, timeout); });
}

void abort(const ProcessGroupPtr& group, const std::string& why) {
  backendOf("abort", group)->abort(why);
}

FailurePtr errored(const ProcessGroupPtr& group) {
  return backendOf("errored", group)->errored();
}

void check(const ProcessGroupPtr& group, std::optional<Milliseconds> timeout) {
  backendOf("check", group)->check(timeout);
}

FailurePtr tryCheck(const ProcessGroupPtr& group, std::optional<Milliseconds> timeout) {
  return failureOf([&] { check(group, timeout); });
}

FailurePtr tryWait(c10d::Work& work) {
  return failureOf([&] { work.wait(); });
}

void setTimeout(const ProcessGroupPtr& group, Milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "setTimeout: timeout: expected a positive time, found ",
                    timeout.count(), " ms");
  backendOf("setTimeout", group)->setTimeout(timeout);
}

int64_t generation(const ProcessGroupPtr& group) {
  return backendOf("generation", group)->generation();
}

CommStats stats(const ProcessGroupPtr& group) {
  return commStatsOf(backendOf("stats", group)->stats());
}

void onFailure(const ProcessGroupPtr& group, std::function<void(const FailurePtr&)> callback) {
  backendOf("onFailure", group)->onFailure(std::move(callback));
}

ProcessGroupPtr split(const ProcessGroupPtr& group, const std::vector<int>& ranks,
                      const std::optional<GroupOptions>& options) {
  backendOf("split", group);
  if (!options) {
    return group->splitGroup(ranks, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
  }
  const c10::intrusive_ptr<c10d::Backend::Options> chosen = optionsOf("split", *options);
  return group->splitGroup(ranks, options->timeout, chosen, options->name, std::nullopt);
}

GroupOrFailure trySplit(const ProcessGroupPtr& group, const std::vector<int>& ranks,
                        const std::optional<GroupOptions>& options) {
  return groupOrFailure([&] { return split(group, ranks, options); });
}

void shutdown(const ProcessGroupPtr& group) {
  backendOf("shutdown", group)->shutdown();
}

void publish(const ProcessGroupPtr& group, const std::string& name) {
  backendOf("publish", group);
  if (findGroup(name)) {
    throw std::invalid_argument("publish: name: expected one that no group has, found '" + name +
                                "'");
  }
  group->setGroupName(name);
  c10d::register_process_group(name, group);
}

ProcessGroupPtr findGroup(const std::string& name) {
  ProcessGroupPtr group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const c10::Error&) {  // torch's way to say that there is none
    return {};
  }
  return backendIn(group) ? group : ProcessGroupPtr();
}

}  // namespace torchft_ext

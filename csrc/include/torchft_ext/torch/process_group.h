// Process groups for C++ programs on libtorch: c10d::ProcessGroup objects of the backend "ft",
// whose communicators are aborted at any moment and made anew with another rank and size, while the
// object stays the same. The same code serves Python's init_process_group("ft").
//
//   auto store = c10::make_intrusive<c10d::TCPStore>("host0", options);
//   auto group = torchft_ext::makeGroup(store, rank, size);
//   std::vector<at::Tensor> tensors{gradient};
//   try {
//     group->allreduce(tensors)->wait();
//   } catch (const torchft_ext::PeerLostError& error) {
//     torchft_ext::configure(group, prefixed(store, "1"), new_rank, new_size);
//   }
//
// Collectives are c10d's own methods of the group; they return c10d::Works, which hold their
// tensors. What Work::wait() throws is a CommError of its kind (torchft_ext/error.h) and a
// c10::DistBackendError. Results are written only while the Work is not done: after a failure or an
// abort nothing of this library writes to a tensor any more.
//
// A wait() on device tensors holds up their stream alone, and says nothing of how the operation
// ends: results are good when check() has returned. GroupOptions::blocking_wait has it said at
// once.
//
// Generations, abort, what must be alike on all members: torchft_ext/comm.h. Bad arguments throw
// c10::ValueError and c10::TypeError before anything is sent, a group that is none of this
// library's std::invalid_argument; a group that is used in a forked child c10::Error, configure()
// after shutdown() std::logic_error. Threads: every function from any thread. Link:
// torchft_ext::torch. torch's minor version must be that of the build: find_package(torchft_ext)
// sees to it.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "torchft_ext/comm.h"
#include "torchft_ext/error.h"

namespace torchft_ext {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// What is unset is taken from the environment (docs: environment variables), else has its default.
struct GroupOptions {
  std::string name = "group";  // in errors and logs; the same on all members
  std::string engine = "ft";   // "ft": CPU tensors, and CUDA's where NCCL is; "host", "nccl": one
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::optional<std::string> interface =
      std::nullopt;  // "eth0", "eth", "eth0,ib0", "=eth0", "^docker,lo"
  std::optional<std::string> port_range = std::nullopt;  // "7000-7100"
  std::optional<bool> local_sockets =
      std::nullopt;  // between processes of one host; false: TCP alone
  std::optional<std::chrono::milliseconds> heartbeat = std::nullopt;  // 0: off
  // An operation that has waited so long asks the others what they do; 0: never.
  std::optional<std::chrono::milliseconds> ask_after = std::nullopt;
  std::optional<bool> nan_check = std::nullopt;  // refuse NaN in what is sent
  // Of operations on device tensors:
  std::optional<c10::Device> device = std::nullopt;  // its communicator is made with a generation
  bool poison = false;                               // failed ones leave NaN in their outputs
  bool high_priority_stream = false;                 // of the streams they run on
  bool blocking_wait = false;  // wait() blocks its caller, and not its stream alone
};

// For programs without exceptions: what was made, or why it was not.
struct GroupOrFailure {
  ProcessGroupPtr group;
  FailurePtr failure;  // null: the group is as the throwing call returns it
};

// Makes a group and its first generation. All members call it with the same store and size, within
// the limit; keys lie under "<name>/". Blocks until it stands. Throws as configure() does; nothing
// is left of it then.
ProcessGroupPtr makeGroup(const StorePtr& store, int rank, int size,
                          const GroupOptions& options = {});
// The same, and returns the failure.
GroupOrFailure tryMakeGroup(const StorePtr& store, int rank, int size,
                            const GroupOptions& options = {});
// Without a generation: the first comes with configure(). The store is kept for split().
ProcessGroupPtr makeUnformedGroup(const StorePtr& store, const GroupOptions& options = {});

// Begins the next generation of a group. store: where its members meet, a place of its own for each
// generation (a c10d::PrefixStore); the same on all. timeout: nullopt for the group's. Throws the
// failure, with which the group is failed then, and whole.
void configure(const ProcessGroupPtr& group, const StorePtr& store, int rank, int size,
               std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// At "host:port/prefix" of a TCPStore.
void configure(const ProcessGroupPtr& group, const std::string& store_address, int rank, int size,
               std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// The same, and returns the failure. Null: it stands.
FailurePtr tryConfigure(const ProcessGroupPtr& group, const StorePtr& store, int rank, int size,
                        std::optional<std::chrono::milliseconds> timeout = std::nullopt);
FailurePtr tryConfigure(const ProcessGroupPtr& group, const std::string& store_address, int rank,
                        int size, std::optional<std::chrono::milliseconds> timeout = std::nullopt);

// Fails the generation, or the configure() that is under way, on all members, and returns when the
// library is out of all tensors.
void abort(const ProcessGroupPtr& group, const std::string& why = "abort() was called");
// The current generation's failure, or that of the last configure(); null: none. Never blocks.
FailurePtr errored(const ProcessGroupPtr& group);
// Blocks until all that was issued is done; throws the generation's failure. A limit that runs out
// fails the generation.
void check(const ProcessGroupPtr& group,
           std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// The same, and returns the failure. Null: all was done.
FailurePtr tryCheck(const ProcessGroupPtr& group,
                    std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// Waits for a Work of a group of this library without an exception. Null: success. What it failed
// with otherwise is rethrown.
FailurePtr tryWait(c10d::Work& work);
void setTimeout(const ProcessGroupPtr& group, std::chrono::milliseconds timeout);
int64_t generation(const ProcessGroupPtr& group);  // 0: none yet
CommStats stats(const ProcessGroupPtr& group);
// As Comm::onFailure().
void onFailure(const ProcessGroupPtr& group, std::function<void(const FailurePtr&)> callback);
// A group of the members with these ranks, in this order; all of the group call it, alike. Null for
// who is not among them. options: nullopt for the group's own; the engine is the group's, and
// `device` is not looked at.
ProcessGroupPtr split(const ProcessGroupPtr& group, const std::vector<int>& ranks,
                      const std::optional<GroupOptions>& options = std::nullopt);
// The same, and returns the failure. Neither: this process is not among them.
GroupOrFailure trySplit(const ProcessGroupPtr& group, const std::vector<int>& ranks,
                        const std::optional<GroupOptions>& options = std::nullopt);
// Says goodbye when all that was issued has been sent; final.
void shutdown(const ProcessGroupPtr& group);

// Names a group in torch's registry, where torchft_ext.adopt(name) of Python finds it, and
// functional collectives do. Throws std::invalid_argument where the name is taken.
void publish(const ProcessGroupPtr& group, const std::string& name);
// A group of this library under that name, made here or by Python in this process. Null: none.
ProcessGroupPtr findGroup(const std::string& name);

}  // namespace torchft_ext

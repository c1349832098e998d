// Process groups for C++ programs on libtorch: c10d::ProcessGroup objects of the backend "ft".
// Their communicators can be aborted at any moment, and made again with another rank and size,
// while the object stays the same. Python's init_process_group("ft") uses the same code.
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
// Collectives are c10d's own methods of the group. They return c10d::Works, which hold their
// tensors. Work::wait() throws a CommError of the failure's kind (torchft_ext/error.h), which is
// also a c10::DistBackendError. Results are written only until the Work is done: after a failure or
// an abort the library writes into no tensor any more.
//
// For device tensors, wait() makes only their stream wait, and does not say whether the operation
// succeeds. Results are valid when check() has returned. With GroupOptions::blocking_wait, wait()
// itself blocks and throws.
//
// torchft_ext/comm.h describes generations, abort, and what must be the same on all members.
// Errors: c10::ValueError and c10::TypeError for bad arguments, before anything is sent;
// std::invalid_argument for a group of another library; c10::Error for a group that is used in a
// forked child; std::logic_error for configure() after shutdown(). Threads: every function from any
// thread. Link with torchft_ext::torch. torch's minor version must be that of the build;
// find_package(torchft_ext) checks that.
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

// An option that is unset comes from the environment (docs/contract.md, "Settings"), or else has
// its default.
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
  // After an operation has waited for this long, the other ranks are asked what they have issued;
  // 0: never.
  std::optional<std::chrono::milliseconds> ask_after = std::nullopt;
  std::optional<bool> nan_check = std::nullopt;  // refuse NaN in inputs
  // Of operations on device tensors:
  std::optional<c10::Device> device = std::nullopt;  // its communicator is made by configure()
  bool poison = false;                               // failed ones leave NaN in their outputs
  bool high_priority_stream = false;                 // of the streams they run on
  bool blocking_wait = false;  // wait() blocks its caller, and not its stream alone
  // Engine "host": device tensors go through host memory, without NCCL.
  std::optional<bool> staged = std::nullopt;
};

// For programs without exceptions: what was made, or why it was not.
struct GroupOrFailure {
  ProcessGroupPtr group;
  FailurePtr failure;  // null: the group is as the throwing call returns it
};

// Makes a group and its first generation. All members call it with the same store and size. The
// keys in the store begin with "<name>/". Blocks until all members are connected, up to the
// timeout. Throws as configure() does; then nothing is left of the group.
ProcessGroupPtr makeGroup(const StorePtr& store, int rank, int size,
                          const GroupOptions& options = {});
// The same, but returns the failure.
GroupOrFailure tryMakeGroup(const StorePtr& store, int rank, int size,
                            const GroupOptions& options = {});
// Makes a group without a generation; configure() begins the first one. The store is kept for
// split().
ProcessGroupPtr makeUnformedGroup(const StorePtr& store, const GroupOptions& options = {});

// Begins the next generation of a group. store: the store in which the members meet, the same on
// all; use a different place for each generation (a c10d::PrefixStore). timeout: nullopt for that
// of the group. Throws the failure, which is then that of the group; configure() can be called
// again.
void configure(const ProcessGroupPtr& group, const StorePtr& store, int rank, int size,
               std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// The same, with the address "host:port/prefix" of a TCPStore.
void configure(const ProcessGroupPtr& group, const std::string& store_address, int rank, int size,
               std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// The same, but returns the failure. Null: success.
FailurePtr tryConfigure(const ProcessGroupPtr& group, const StorePtr& store, int rank, int size,
                        std::optional<std::chrono::milliseconds> timeout = std::nullopt);
FailurePtr tryConfigure(const ProcessGroupPtr& group, const std::string& store_address, int rank,
                        int size, std::optional<std::chrono::milliseconds> timeout = std::nullopt);

// Fails the generation, or the configure() that is under way, on all members. Returns when the
// library no longer uses any tensor.
void abort(const ProcessGroupPtr& group, const std::string& why = "abort() was called");
// The current generation's failure, or that of the last configure(); null: none. Never blocks.
FailurePtr errored(const ProcessGroupPtr& group);
// Blocks until everything that was issued is done. Throws the generation's failure. If the timeout
// passes, the generation fails.
void check(const ProcessGroupPtr& group,
           std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// The same, but returns the failure. Null: everything was done.
FailurePtr tryCheck(const ProcessGroupPtr& group,
                    std::optional<std::chrono::milliseconds> timeout = std::nullopt);
// Waits for a Work of a group of this library, and returns its failure without throwing it. Null:
// success. An exception of another kind is rethrown.
FailurePtr tryWait(c10d::Work& work);
void setTimeout(const ProcessGroupPtr& group, std::chrono::milliseconds timeout);
int64_t generation(const ProcessGroupPtr& group);  // 0: none yet
CommStats stats(const ProcessGroupPtr& group);
// As Comm::onFailure().
void onFailure(const ProcessGroupPtr& group, std::function<void(const FailurePtr&)> callback);
// Makes a group of the members with these ranks, in this order. All members of the group call it
// with the same arguments. Returns null if this process is not among the ranks. options: nullopt
// for those of the group; the engine is always that of the group, and `device` is ignored.
ProcessGroupPtr split(const ProcessGroupPtr& group, const std::vector<int>& ranks,
                      const std::optional<GroupOptions>& options = std::nullopt);
// The same, but returns the failure. Group and failure are null if this process is not among the
// ranks.
GroupOrFailure trySplit(const ProcessGroupPtr& group, const std::vector<int>& ranks,
                        const std::optional<GroupOptions>& options = std::nullopt);
// Waits until everything that was issued has been sent, says goodbye, and ends the group for good.
void shutdown(const ProcessGroupPtr& group);

// Registers a group in torch under a name. Python's torchft_ext.adopt(name) finds it there, and so
// do functional collectives. Throws std::invalid_argument if the name is taken.
void publish(const ProcessGroupPtr& group, const std::string& name);
// A group of this library under that name, made here or by Python in this process. Null: none.
ProcessGroupPtr findGroup(const std::string& name);

}  // namespace torchft_ext

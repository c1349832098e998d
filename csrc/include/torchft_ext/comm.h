// A group of processes that run collectives on plain memory, without torch. C++ programs get the
// CPU engine, its failure detection, and generations. torchft_ext/c.h offers the same to C
// programs.
//
//   auto store = torchft_ext::makeFileStore("/shared/job7");
//   torchft_ext::Comm comm;
//   comm.configure(store, "job7/0", rank, size);
//   comm.allreduce(values.data(), values.size(), DataType::kFloat32, Reduction::kSum).wait();
//
// Generations: configure() begins a generation with a rank and a size. All members call it at the
// same time, with a prefix that no other generation uses. The generation ends with the next
// configure(), with shutdown(), or with a failure. After a failure every operation of the
// generation has failed on all members, with an error that says who failed and how. The next
// configure() begins a generation without the lost members. No process restarts, and no object is
// made again.
//
// Ranks are normally processes. Threads of one process may be ranks too, each with its own object.
// That is for tests and small worlds, because each such rank needs as many threads and sockets as a
// process.
//
// Ownership of memory: the memory that an operation gets belongs to the caller, and must exist
// until the operation's Request is done. Done means that the library no longer uses the memory,
// also after a failure, an abort or a timeout; outputs then hold what had arrived by then. Inputs
// are never written. An input and an output may be the same memory only if the method says "in
// place".
//
// Threads: every method from any thread. Operations of one generation run in the order of issue,
// which must be the same on all members. Only send and recv may be issued in any order, and delay
// no other operation. A Comm may be destroyed at any time; then its generation fails on the others.
// shutdown() says goodbye instead. In a forked child every method throws std::runtime_error.
//
// Errors: CommError and its kinds (torchft_ext/error.h) for failures of the generation;
// std::invalid_argument for bad arguments, before anything is sent; std::logic_error after
// shutdown(), and for a second configure() at the same time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torchft_ext/error.h"
#include "torchft_ext/failure.h"
#include "torchft_ext/store.h"

namespace torchft_ext {

// Numbers are those of the C interface: append only.
enum class DataType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,   // IEEE 754 binary16
  kBFloat16 = 3,  // the upper half of a float
  kInt8 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kUint8 = 8,
  kBool = 9,  // a byte, 0 or 1
};
size_t sizeOf(DataType type);  // in bytes

// kFloat16 and kBFloat16 are computed as floats and rounded after each step. Integers wrap round;
// kAvg of integers truncates towards zero. The last three: integers and bool.
enum class Reduction : uint8_t {
  kSum = 0,
  kAvg = 1,  // not of bool
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBitAnd = 6,
  kBitOr = 7,
  kBitXor = 8,
};

// One operation's completion. Copies share it. Threads: any.
class Request {
 public:
  Request();  // of nothing: done
  ~Request();
  Request(const Request&);
  Request(Request&&) noexcept;
  Request& operator=(const Request&);
  Request& operator=(Request&&) noexcept;

  // Blocks until the operation is done: at most for its timeout, and one more second in which the
  // library stops using the memory. Throws the failure.
  void wait() const;
  // The same, and returns the failure. Null: success.
  FailurePtr tryWait() const;
  bool done() const noexcept;
  // Null: not done, or success.
  FailurePtr failure() const noexcept;
  // After a recv from any rank is done: the rank that sent. Otherwise -1.
  int source() const noexcept;

 private:
  friend class Comm;
  struct State;
  explicit Request(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

struct CommOptions {
  std::string name = "comm";  // in errors and logs, and the same on all members
  // Of operations and of configure(), unless they are given one.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // The interface to listen on: "eth0", a prefix "eth", a list "eth0,ib0", "=eth0" exactly,
  // "^docker,lo" all but these; or a numeric address. Empty: loopback, so for one host.
  std::string interface {};
  std::string port_range{};   // "7000-7100"; empty: any free port
  bool local_sockets = true;  // between processes of one host; false: TCP alone
  // A member that does not run for this long counts as lost; 0: never. At least 100 ms.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(5);
  // After an operation has waited for this long, the other members are asked what they have issued.
  // A line in the log, and the error of a timeout, name those that have not issued the operation.
  // 0: never. At most a day.
  std::chrono::milliseconds ask_after = std::chrono::seconds(1);
};

// Counts since the object was made.
struct CommStats {
  uint64_t generations = 0;
  uint64_t failed_configures = 0;
  uint64_t operations = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  FailurePtr last_failure;  // null: none
  // The phases of the last configure(), in order, and how long each took.
  std::vector<std::pair<std::string, std::chrono::nanoseconds>> last_configure;
  // By rank of this generation: how long operations of this process have waited for that rank. Only
  // operations that waited for longer than CommOptions::ask_after count. Empty: no generation.
  std::vector<std::chrono::nanoseconds> waited_for{};
  // Why collectives of this generation run over sockets and not in shared memory, such as "rank 1
  // is on another host". Empty: they do not.
  std::string why_over_sockets{};
};

class Comm {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit Comm(const CommOptions& options = {});
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Ends the current generation and begins a new one. All members call it with the same store,
  // prefix and size. Blocks until all members are connected. prefix: a different one for each
  // generation. timeout: 0 for that of the options.
  void configure(const std::shared_ptr<Store>& store, const std::string& prefix, int rank, int size,
                 Milliseconds timeout = Milliseconds(0));
  // The same, but returns the failure, which is then that of the group. Null: success.
  FailurePtr tryConfigure(const std::shared_ptr<Store>& store, const std::string& prefix, int rank,
                          int size, Milliseconds timeout = Milliseconds(0));
  // Fails the generation, or the configure() that is under way, here and on all members. Releases
  // every waiting thread, then waits until the library no longer uses any of the caller's memory
  // (normally microseconds).
  void abort(const std::string& why = "abort() was called");
  // Waits until everything that was issued has been sent, says goodbye, and ends the group for
  // good. False: not everything was sent within the timeout.
  bool shutdown(Milliseconds timeout = std::chrono::seconds(5));

  // The current generation's failure, or the last configure()'s; null: none. Never blocks.
  FailurePtr errored() const;
  // Waits until everything that was issued is done. Throws the generation's failure. If the timeout
  // passes, the generation fails. timeout: 0 for that of the options.
  void check(Milliseconds timeout = Milliseconds(0));
  // The same, but returns the failure. Null: everything was done.
  FailurePtr tryCheck(Milliseconds timeout = Milliseconds(0));
  int rank() const;                       // in the last generation that stood
  int size() const;                       // 1 before the first
  int64_t generation() const;             // 0 before the first
  void setTimeout(Milliseconds timeout);  // of later operations and configures
  CommStats stats() const;
  // The callback is called once for each generation that fails from now on, with its failure, on a
  // thread of the library, soon after waiting threads are released. It may block for a while, and
  // it may call this object. What it throws is logged. An empty callback ends the calls. A call may
  // still be running while this object is destroyed, so what the callback refers to must live
  // longer than that.
  void onFailure(std::function<void(const FailurePtr&)> callback);

  // ---- operations. They return immediately. count: the number of items; the memory has count *
  // sizeOf(type) bytes, and a parameter named all, all_inputs or all_outputs has size() times that.
  // timeout: 0 for that of the options.

  // In place: the data of all ranks, reduced, on every rank.
  Request allreduce(void* data, size_t count, DataType type, Reduction reduction,
                    Milliseconds timeout = Milliseconds(0));
  // In place: root's data, on every rank.
  Request broadcast(void* data, size_t count, DataType type, int root,
                    Milliseconds timeout = Milliseconds(0));
  // all[i * count ...] = rank i's input. input may be its own part of all.
  Request allgather(const void* input, void* all, size_t count, DataType type,
                    Milliseconds timeout = Milliseconds(0));
  // output = all[rank * count ...] of all ranks, reduced. output may be that part of all.
  Request reduceScatter(const void* all, void* output, size_t count, DataType type,
                        Reduction reduction, Milliseconds timeout = Milliseconds(0));
  // root's output = the inputs of all ranks, reduced; it may be root's input. Others pass null.
  Request reduce(const void* input, void* output, size_t count, DataType type, Reduction reduction,
                 int root, Milliseconds timeout = Milliseconds(0));
  // root's all[i * count ...] = rank i's input. Others pass null for all.
  Request gather(const void* input, void* all, size_t count, DataType type, int root,
                 Milliseconds timeout = Milliseconds(0));
  // output = root's all[rank * count ...]. Others pass null for all.
  Request scatter(const void* all, void* output, size_t count, DataType type, int root,
                  Milliseconds timeout = Milliseconds(0));
  // all_outputs[i * count ...] = rank i's all_inputs[rank * count ...].
  Request alltoall(const void* all_inputs, void* all_outputs, size_t count, DataType type,
                   Milliseconds timeout = Milliseconds(0));
  Request barrier(Milliseconds timeout = Milliseconds(0));
  // To and from a rank, matched by tag, 0 to 2^31 - 1. source -1: from any rank.
  Request send(const void* data, size_t count, DataType type, int destination, int tag = 0,
               Milliseconds timeout = Milliseconds(0));
  Request recv(void* data, size_t count, DataType type, int source, int tag = 0,
               Milliseconds timeout = Milliseconds(0));

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

// Writes what all groups of this process have recorded, those of torch too: the last 2,000
// operations of each (TORCH_FR_BUFFER_SIZE), from at most 8 generations. The file is JSON for
// torchft_ext.analyze if the path ends in ".json", and a pickle for torch's analyser otherwise.
// Blocks for the disk only. Threads: any. An earlier file of that name is replaced in one step.
// Throws std::system_error if the file cannot be written; an earlier one is then left as it was.
void dump(const std::string& path);

// Says goodbye for every Comm and ends all threads of the library in this process, within
// `timeout`. exit() does this by itself; call it before you unload the library. False: something
// did not end.
bool endProcess(std::chrono::milliseconds timeout = std::chrono::seconds(1));

}  // namespace torchft_ext

// A group of processes that compute collectives on plain memory, without torch: the CPU engine, its
// failure detection, and generations, for C++ programs. torchft_ext/c.h has the same for C.
//
//   auto store = torchft_ext::makeFileStore("/shared/job7");
//   torchft_ext::Comm comm;
//   comm.configure(store, "job7/0", rank, size);
//   comm.allreduce(values.data(), values.size(), DataType::kFloat32, Reduction::kSum).wait();
//
// Generations: configure() begins one with a rank and a size, on every member at the same time and
// with a prefix of its own. It ends by the next configure(), by shutdown(), or by a failure: then
// every operation of it has failed, on all members, with who failed and how, and configure() begins
// the next one, without those who are lost. Nothing is restarted, no object is made anew.
//
// Ranks are processes, as a rule. Threads of one process may be ranks too, with an object each: for
// tests and small worlds, since each of them costs what a process has.
//
// Ownership of memory: what an operation is given stays the caller's, and must be there until its
// Request is done. Done means that the library is out of it, also after a failure, an abort or a
// timeout; then outputs hold what had come so far. Inputs are never written. An input and an output
// may be the same memory only where "in place" stands.
//
// Threads: every method from any thread. Operations of one generation run in the order of issue,
// which must be the same on all members, but for send and recv, which hold up nothing. A Comm may
// be destroyed at any time: its generation fails on the others; shutdown() says goodbye instead. It
// cannot be used in a forked child: std::runtime_error.
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

  // Blocks until it is done, its limit at most (and a second, in which the library leaves the
  // memory); throws the failure.
  void wait() const;
  // The same, and returns the failure. Null: success.
  FailurePtr tryWait() const;
  bool done() const noexcept;
  // Null: not done, or success.
  FailurePtr failure() const noexcept;
  // Of recv from any rank, done: the rank it came from; else -1.
  int source() const noexcept;

 private:
  friend class Comm;
  struct State;
  explicit Request(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

struct CommOptions {
  std::string name = "comm";  // in errors and logs, and the same on all members
  // Of operations and of configure(), where they are given none.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // The interface to listen on: "eth0", a prefix "eth", a list "eth0,ib0", "=eth0" exactly,
  // "^docker,lo" all but these; or a numeric address. Empty: loopback, so for one host.
  std::string interface {};
  std::string port_range{};   // "7000-7100"; empty: any free port
  bool local_sockets = true;  // between processes of one host; false: TCP alone
  // A member that does not run for so long is left out; 0: never. At least 100 ms.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(5);
  // An operation that has waited so long asks the other members what they do: a line in the log,
  // and a timeout's error, name those that have not issued it. 0: never. At most a day.
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
  // Of the last configure(), in order: what it did and for how long.
  std::vector<std::pair<std::string, std::chrono::nanoseconds>> last_configure;
  // By rank of this generation: how long operations here have waited for it, of those that waited
  // for longer than CommOptions::ask_after. Empty: there is no generation.
  std::vector<std::chrono::nanoseconds> waited_for{};
};

class Comm {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit Comm(const CommOptions& options = {});
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Begins a generation, and ends the one before. All members call it with the same store, prefix
  // and size, within the limit. Blocks until it stands. prefix: one of its own for each generation.
  // timeout: 0 for the options'.
  void configure(const std::shared_ptr<Store>& store, const std::string& prefix, int rank, int size,
                 Milliseconds timeout = Milliseconds(0));
  // The same, and returns the failure, with which the group is failed then. Null: it stands.
  FailurePtr tryConfigure(const std::shared_ptr<Store>& store, const std::string& prefix, int rank,
                          int size, Milliseconds timeout = Milliseconds(0));
  // Fails the generation, or the configure() that is under way, here and on all members. Releases
  // every waiter, then waits until the library is out of all memory (microseconds, as a rule).
  void abort(const std::string& why = "abort() was called");
  // Says goodbye when all that was issued has been sent, and ends the group for good. False: not
  // all was sent by the limit.
  bool shutdown(Milliseconds timeout = std::chrono::seconds(5));

  // The current generation's failure, or the last configure()'s; null: none. Never blocks.
  FailurePtr errored() const;
  // Waits until all that was issued is done, and throws the generation's failure. A limit that runs
  // out fails the generation. timeout: 0 for the options'.
  void check(Milliseconds timeout = Milliseconds(0));
  // The same, and returns the failure. Null: all was done.
  FailurePtr tryCheck(Milliseconds timeout = Milliseconds(0));
  int rank() const;                       // in the last generation that stood
  int size() const;                       // 1 before the first
  int64_t generation() const;             // 0 before the first
  void setTimeout(Milliseconds timeout);  // of later operations and configures
  CommStats stats() const;
  // Called once for each generation that fails from now on, with its failure, on a thread of the
  // library's own, soon after waiters are released:
  // it may block for a while, and it may call this object. What it throws is logged. Empty: no
  // more. A call may be under way while this object is destroyed: what it refers to must outlive
  // it.
  void onFailure(std::function<void(const FailurePtr&)> callback);

  // ---- operations. count: items; memory of count * sizeOf(type) bytes, or of size() times that
  // where "all" stands. timeout: 0 for the options'. They return at once.

  // In place: everybody's data, reduced, on all.
  Request allreduce(void* data, size_t count, DataType type, Reduction reduction,
                    Milliseconds timeout = Milliseconds(0));
  // In place: root's data, on all.
  Request broadcast(void* data, size_t count, DataType type, int root,
                    Milliseconds timeout = Milliseconds(0));
  // all[i * count ...] = rank i's input. input may be where it belongs in all.
  Request allgather(const void* input, void* all, size_t count, DataType type,
                    Milliseconds timeout = Milliseconds(0));
  // output = everybody's all[rank * count ...], reduced. output may be that part of all.
  Request reduceScatter(const void* all, void* output, size_t count, DataType type,
                        Reduction reduction, Milliseconds timeout = Milliseconds(0));
  // root's output = everybody's input, reduced; it may be its input. Others' output: null.
  Request reduce(const void* input, void* output, size_t count, DataType type, Reduction reduction,
                 int root, Milliseconds timeout = Milliseconds(0));
  // root's all[i * count ...] = rank i's input. Others' all: null.
  Request gather(const void* input, void* all, size_t count, DataType type, int root,
                 Milliseconds timeout = Milliseconds(0));
  // output = root's all[rank * count ...]. Others' all: null.
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

// Ends all threads of the library in this process and says goodbye for every Comm, as exit() does
// by itself, within `timeout`. False: something did not end. For programs that unload it.
bool endProcess(std::chrono::milliseconds timeout = std::chrono::seconds(1));

}  // namespace torchft_ext

#include "torchft_ext/comm.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <variant>

#include "base/fork.h"
#include "base/raise.h"
#include "comm/dump_files.h"
#include "comm/failure_listener.h"
#include "comm/group.h"
#include "comm/public_stats.h"
#include "embed/program_store.h"
#include "host/host_engine.h"
#include "host/network_limits.h"
#include "host/process.h"
#include "host/shared_environment.h"

namespace torchft_ext {
namespace {

// Past its deadline an operation completes as soon as the engine is out of its memory; this is how
// long that may take.
constexpr std::chrono::seconds kGrace{1};
constexpr int kAnySource = -1;

[[noreturn]] void refuse(const char* op, const std::string& what) {
  throw std::invalid_argument(std::string(op) + ": " + what);
}

// The text is made only where something is refused: every operation comes by here.
template <typename Text>
void require(bool good, const char* op, const Text& text) {
  if (!good) refuse(op, text());
}

std::string found(int64_t number) {
  return ", found " + std::to_string(number);
}

[[noreturn]] void throwFor(const FailurePtr& failure) {
  raiseAs<std::runtime_error>(failure, failure->describe());
}

DType dtypeOf(const char* op, DataType type) {
  const auto number = static_cast<uint8_t>(type);
  require(number <= static_cast<uint8_t>(DataType::kBool), op,
          [&] { return "type: expected a DataType" + found(number); });
  return static_cast<DType>(number);
}

static_assert(static_cast<int>(DataType::kBFloat16) == static_cast<int>(DType::kBFloat16));
static_assert(static_cast<int>(DataType::kBool) == static_cast<int>(DType::kBool));
static_assert(static_cast<int>(Reduction::kMax) == static_cast<int>(ReduceKind::kMax));
static_assert(static_cast<int>(Reduction::kBitAnd) == static_cast<int>(ReduceKind::kBand));
static_assert(static_cast<int>(Reduction::kBitXor) == static_cast<int>(ReduceKind::kBxor));

ReduceKind reductionOf(const char* op, DataType type, Reduction reduction) {
  const auto kind = static_cast<ReduceKind>(reduction);
  const auto number = static_cast<int>(reduction);
  require(number <= static_cast<int>(Reduction::kBitXor) && kind != ReduceKind::kPreMulSum, op,
          [&] { return "reduction: expected a Reduction" + found(number); });
  const bool bitwise = number >= static_cast<int>(Reduction::kBitAnd);
  require(!bitwise || type >= DataType::kInt8, op, [&] {
    return "reduction: expected integers or bool for a bitwise one, found " +
           std::string(toString(dtypeOf(op, type)));
  });
  require(reduction != Reduction::kAvg || type != DataType::kBool, op,
          [&] { return std::string("reduction: expected another one than kAvg for bool"); });
  return kind;
}

Buffer bufferOf(const char* op, const char* name, const void* data, size_t bytes) {
  require(data != nullptr || bytes == 0, op,
          [&] { return std::string(name) + ": expected memory, found null"; });
  // Operation has no const; what only is an input is not written.
  return {static_cast<uint8_t*>(const_cast<void*>(data)), bytes};
}

std::vector<Buffer> cutInto(Buffer whole, int parts) {
  std::vector<Buffer> all;
  const size_t each = whole.bytes / static_cast<size_t>(parts);
  for (int i = 0; i < parts; ++i) {
    uint8_t* const begin =
        whole.data == nullptr ? nullptr : whole.data + each * static_cast<size_t>(i);
    all.push_back({begin, each});
  }
  return all;
}

size_t bytesOf(const char* op, size_t count, DataType type, int times = 1) {
  const size_t item = itemSize(dtypeOf(op, type)) * static_cast<size_t>(times);
  require(count <= SIZE_MAX / 2 / item, op,
          [&] { return "count: expected less" + found(static_cast<int64_t>(count)); });
  return count * item;
}

// One buffer of so many items for each rank.
std::vector<Buffer> partsOf(const char* op, const char* name, const void* data, size_t count,
                            DataType type, int size) {
  return cutInto(bufferOf(op, name, data, bytesOf(op, count, type, size)), size);
}

void requireRank(const char* op, const char* name, int rank, int size) {
  require(rank >= 0 && rank < size, op, [&] {
    return std::string(name) + ": expected 0 to " + std::to_string(size - 1) + found(rank);
  });
}

Operation rooted(const char* op, OpKind kind, DataType type, int root, int size) {
  requireRank(op, "root", root, size);
  Operation operation;
  operation.kind = kind;
  operation.dtype = dtypeOf(op, type);
  operation.root = root;
  return operation;
}

SocketAddress addressOf(const std::string& interface) {
  const std::string wanted = interface.empty() ? "127.0.0.1" : interface;
  if (const auto numeric = SocketAddress::fromNumeric(wanted, 0)) return *numeric;
  const auto named = addressOfInterface(wanted);
  require(named.has_value(), "Comm", [&] {
    return "interface: expected a numeric address, or an interface that is up and has an address, "
           "found '" +
           wanted + "'";
  });
  return *named;
}

HostEngineOptions engineOptions(const CommOptions& options) {
  HostEngineOptions engine;
  engine.bind_address = addressOf(options.interface);
  const auto ports = portRangeOf(options.port_range);
  if (const auto* problem = std::get_if<std::string>(&ports))
    refuse("Comm", "port_range" + *problem);
  engine.ports = std::get<PortRange>(ports);
  const std::string problem = heartbeatProblem(options.heartbeat);
  require(problem.empty(), "Comm", [&] { return "heartbeat" + problem; });
  engine.heartbeat_limit = options.heartbeat;
  engine.local_sockets = options.local_sockets;
  const std::string of_environment = useSharedEnvironment(&engine);
  if (!of_environment.empty()) refuse("Comm", of_environment);
  return engine;
}

std::shared_ptr<Engine> engineFor(const CommOptions& options) {
  require(options.timeout.count() > 0, "Comm", [&] {
    return "timeout: expected a positive time" + found(options.timeout.count()) + " ms";
  });
  const std::string problem = askAfterProblem(options.ask_after);
  require(problem.empty(), "Comm", [&] { return "ask_after" + problem; });
  auto made = hostEngine(engineOptions(options));
  if (const auto* failure = std::get_if<Failure>(&made)) {
    throwFor(std::make_shared<const Failure>(*failure));
  }
  return std::get<std::shared_ptr<Engine>>(std::move(made));
}

}  // namespace

size_t sizeOf(DataType type) {
  return itemSize(dtypeOf("sizeOf", type));
}

// ---------------------------------------------------------------- requests

struct Request::State {
  std::shared_ptr<OpState> op;
};

Request::Request() = default;
Request::~Request() = default;
Request::Request(const Request&) = default;
Request::Request(Request&&) noexcept = default;
Request& Request::operator=(const Request&) = default;
Request& Request::operator=(Request&&) noexcept = default;
Request::Request(std::shared_ptr<State> state) : state_(std::move(state)) {}

void Request::wait() const {
  if (const FailurePtr failure = tryWait()) throwFor(failure);
}

FailurePtr Request::tryWait() const {
  if (!state_) return nullptr;
  OpState& op = *state_->op;
  if (op.done()) return op.failure();
  // The watchdog fails it at its deadline; what is left is that the engine leaves the memory.
  const Deadline until = op.deadline().isNever()
                             ? Deadline::never()
                             : Deadline::after(op.deadline().remaining() + kGrace);
  if (op.wait(until)) return op.failure();
  Failure stuck = op.lifecycle()->ownFailure(
      FailureKind::kInternal, "the library did not leave the operation's memory: keep it");
  return std::make_shared<const Failure>(std::move(stuck));
}

bool Request::done() const noexcept {
  return !state_ || state_->op->done();
}

FailurePtr Request::failure() const noexcept {
  return state_ ? state_->op->failure() : nullptr;
}

int Request::source() const noexcept {
  return state_ ? state_->op->sourceRank() : -1;
}

// ---------------------------------------------------------------- the group

struct Comm::Impl {
  explicit Impl(const CommOptions& options)
      : listener(std::make_shared<FailureListener>()),
        group(std::make_shared<Group>(
            options.name, engineFor(options), sharedWatchdog(), options.timeout, nullptr,
            [listener = listener](const std::shared_ptr<Lifecycle>& lifecycle) {
              listener->follow(lifecycle);
            })) {
    group->setAskAfter(options.ask_after);
    rememberGroup(group);
  }

  void requireOwnProcess() const {
    if (forks == forkCount()) return;
    throw std::runtime_error("this Comm was made before fork(), in process " + std::to_string(pid) +
                             ", and cannot be used in process " + std::to_string(::getpid()) +
                             ": make one here");
  }

  // With one rank and size for all that is laid out by them.
  struct Place {
    int rank;
    int size;
    int64_t generation;
  };
  Place place() const {
    requireOwnProcess();
    for (;;) {
      const int64_t generation = group->generation();
      const Place here{group->rank(), group->size(), generation};
      if (group->generation() == generation) return here;
    }
  }

  Request issue(Operation operation, const Place& here, Milliseconds timeout) const {
    require(timeout.count() >= 0, toString(operation.kind), [&] {
      return "timeout: expected zero (the options') or more" + found(timeout.count()) + " ms";
    });
    operation.generation = here.generation;
    operation.timeout = timeout;
    auto state = std::make_shared<Request::State>();
    state->op = group->issue(std::move(operation));
    return Request(std::move(state));
  }

  const uint64_t forks = forkCount();
  const pid_t pid = ::getpid();
  const std::shared_ptr<FailureListener> listener;
  const std::shared_ptr<Group> group;
};

Comm::Comm(const CommOptions& options) : impl_(std::make_unique<Impl>(options)) {}

Comm::~Comm() {
  if (impl_->forks == forkCount()) return;
  // The threads and locks under an inherited group are the parent's: let it leak. A copy that
  // nobody destroys, and not one from the heap: a destructor cannot report bad_alloc.
  alignas(std::shared_ptr<Group>) std::byte copy[sizeof(std::shared_ptr<Group>)];
  new (copy) std::shared_ptr<Group>(impl_->group);
}

void Comm::configure(const std::shared_ptr<Store>& store, const std::string& prefix, int rank,
                     int size, Milliseconds timeout) {
  if (const FailurePtr failure = tryConfigure(store, prefix, rank, size, timeout))
    throwFor(failure);
}

FailurePtr Comm::tryConfigure(const std::shared_ptr<Store>& store, const std::string& prefix,
                              int rank, int size, Milliseconds timeout) {
  constexpr const char* kOp = "configure";
  impl_->requireOwnProcess();
  require(store != nullptr, kOp,
          [&] { return std::string("store: expected a store, found null"); });
  require(!prefix.empty(), kOp, [&] {
    return std::string("prefix: expected one of its own for each generation, found none");
  });
  require(size >= 1 && size <= kMostRanks, kOp,
          [&] { return "size: expected 1 to " + std::to_string(kMostRanks) + found(size); });
  require(rank >= 0 && rank < size, kOp,
          [&] { return "rank: expected 0 to " + std::to_string(size - 1) + found(rank); });
  require(timeout.count() >= 0, kOp, [&] {
    return "timeout: expected zero (the options') or more" + found(timeout.count()) + " ms";
  });
  std::optional<Duration> limit;
  if (timeout.count() > 0) limit = timeout;
  return impl_->group->configure(storeThreadOf(store), prefix, rank, size, limit);
}

void Comm::abort(const std::string& why) {
  impl_->requireOwnProcess();
  impl_->group->abort(why);
}

bool Comm::shutdown(Milliseconds timeout) {
  impl_->requireOwnProcess();
  require(timeout.count() >= 0, "shutdown",
          [&] { return "timeout: expected zero or more" + found(timeout.count()) + " ms"; });
  return impl_->group->shutdown(Deadline::after(timeout));
}

FailurePtr Comm::errored() const {
  impl_->requireOwnProcess();
  return impl_->group->errored();
}

void Comm::check(Milliseconds timeout) {
  if (const FailurePtr failure = tryCheck(timeout)) throwFor(failure);
}

FailurePtr Comm::tryCheck(Milliseconds timeout) {
  impl_->requireOwnProcess();
  require(timeout.count() >= 0, "check", [&] {
    return "timeout: expected zero (the options') or more" + found(timeout.count()) + " ms";
  });
  const Duration limit = timeout.count() > 0 ? Duration(timeout) : impl_->group->timeout();
  return impl_->group->check(Deadline::after(limit));
}

int Comm::rank() const {
  return impl_->group->rank();
}

int Comm::size() const {
  return impl_->group->size();
}

int64_t Comm::generation() const {
  return impl_->group->generation();
}

void Comm::setTimeout(Milliseconds timeout) {
  require(timeout.count() > 0, "setTimeout",
          [&] { return "timeout: expected a positive time" + found(timeout.count()) + " ms"; });
  impl_->requireOwnProcess();
  impl_->group->setTimeout(timeout);
}

CommStats Comm::stats() const {
  impl_->requireOwnProcess();
  return commStatsOf(impl_->group->stats());
}

void Comm::onFailure(std::function<void(const FailurePtr&)> callback) {
  impl_->requireOwnProcess();
  impl_->listener->set(std::move(callback));
}

// ---------------------------------------------------------------- operations

Request Comm::allreduce(void* data, size_t count, DataType type, Reduction reduction,
                        Milliseconds timeout) {
  Operation operation;
  operation.kind = OpKind::kAllreduce;
  operation.dtype = dtypeOf("allreduce", type);
  operation.reduce = reductionOf("allreduce", type, reduction);
  operation.outputs = {bufferOf("allreduce", "data", data, bytesOf("allreduce", count, type))};
  return impl_->issue(std::move(operation), impl_->place(), timeout);
}

Request Comm::broadcast(void* data, size_t count, DataType type, int root, Milliseconds timeout) {
  const Impl::Place here = impl_->place();
  Operation operation = rooted("broadcast", OpKind::kBroadcast, type, root, here.size);
  operation.outputs = {bufferOf("broadcast", "data", data, bytesOf("broadcast", count, type))};
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::allgather(const void* input, void* all, size_t count, DataType type,
                        Milliseconds timeout) {
  constexpr const char* kOp = "allgather";
  const Impl::Place here = impl_->place();
  Operation operation;
  operation.kind = OpKind::kAllgather;
  operation.dtype = dtypeOf(kOp, type);
  operation.inputs = {bufferOf(kOp, "input", input, bytesOf(kOp, count, type))};
  operation.outputs = partsOf(kOp, "all", all, count, type, here.size);
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::reduceScatter(const void* all, void* output, size_t count, DataType type,
                            Reduction reduction, Milliseconds timeout) {
  constexpr const char* kOp = "reduce_scatter";
  const Impl::Place here = impl_->place();
  Operation operation;
  operation.kind = OpKind::kReduceScatter;
  operation.dtype = dtypeOf(kOp, type);
  operation.reduce = reductionOf(kOp, type, reduction);
  operation.inputs = partsOf(kOp, "all", all, count, type, here.size);
  operation.outputs = {bufferOf(kOp, "output", output, bytesOf(kOp, count, type))};
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::reduce(const void* input, void* output, size_t count, DataType type,
                     Reduction reduction, int root, Milliseconds timeout) {
  const Impl::Place here = impl_->place();
  Operation operation = rooted("reduce", OpKind::kReduce, type, root, here.size);
  operation.reduce = reductionOf("reduce", type, reduction);
  operation.inputs = {bufferOf("reduce", "input", input, bytesOf("reduce", count, type))};
  if (here.rank == root) {
    operation.outputs = {bufferOf("reduce", "output", output, bytesOf("reduce", count, type))};
  }
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::gather(const void* input, void* all, size_t count, DataType type, int root,
                     Milliseconds timeout) {
  const Impl::Place here = impl_->place();
  Operation operation = rooted("gather", OpKind::kGather, type, root, here.size);
  operation.inputs = {bufferOf("gather", "input", input, bytesOf("gather", count, type))};
  if (here.rank == root) operation.outputs = partsOf("gather", "all", all, count, type, here.size);
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::scatter(const void* all, void* output, size_t count, DataType type, int root,
                      Milliseconds timeout) {
  const Impl::Place here = impl_->place();
  Operation operation = rooted("scatter", OpKind::kScatter, type, root, here.size);
  operation.outputs = {bufferOf("scatter", "output", output, bytesOf("scatter", count, type))};
  if (here.rank == root) operation.inputs = partsOf("scatter", "all", all, count, type, here.size);
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::alltoall(const void* all_inputs, void* all_outputs, size_t count, DataType type,
                       Milliseconds timeout) {
  constexpr const char* kOp = "alltoall";
  const Impl::Place here = impl_->place();
  Operation operation;
  operation.kind = OpKind::kAlltoall;
  operation.dtype = dtypeOf(kOp, type);
  operation.inputs = partsOf(kOp, "all_inputs", all_inputs, count, type, here.size);
  operation.outputs = partsOf(kOp, "all_outputs", all_outputs, count, type, here.size);
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::barrier(Milliseconds timeout) {
  Operation operation;
  operation.kind = OpKind::kBarrier;
  return impl_->issue(std::move(operation), impl_->place(), timeout);
}

Request Comm::send(const void* data, size_t count, DataType type, int destination, int tag,
                   Milliseconds timeout) {
  constexpr const char* kOp = "send";
  const Impl::Place here = impl_->place();
  requireRank(kOp, "destination", destination, here.size);
  require(destination != here.rank, kOp,
          [&] { return std::string("destination: expected another rank than this one"); });
  require(tag >= 0, kOp, [&] { return "tag: expected 0 or more" + found(tag); });
  Operation operation;
  operation.kind = OpKind::kSend;
  operation.dtype = dtypeOf(kOp, type);
  operation.peer = destination;
  operation.tag = static_cast<uint64_t>(tag);
  operation.inputs = {bufferOf(kOp, "data", data, bytesOf(kOp, count, type))};
  return impl_->issue(std::move(operation), here, timeout);
}

Request Comm::recv(void* data, size_t count, DataType type, int source, int tag,
                   Milliseconds timeout) {
  constexpr const char* kOp = "recv";
  const Impl::Place here = impl_->place();
  if (source != kAnySource) requireRank(kOp, "source", source, here.size);
  require(source != here.rank, kOp,
          [&] { return std::string("source: expected another rank than this one"); });
  require(tag >= 0, kOp, [&] { return "tag: expected 0 or more" + found(tag); });
  Operation operation;
  operation.kind = OpKind::kRecv;
  operation.dtype = dtypeOf(kOp, type);
  operation.peer = source;
  operation.tag = static_cast<uint64_t>(tag);
  operation.outputs = {bufferOf(kOp, "data", data, bytesOf(kOp, count, type))};
  return impl_->issue(std::move(operation), here, timeout);
}

void dump(const std::string& path) {
  const int error = dumpEverything(path);
  if (error != 0)
    throw std::system_error(error, std::generic_category(), "dump: cannot write " + path);
}

bool endProcess(std::chrono::milliseconds timeout) {
  return processExit(Deadline::after(timeout));
}

}  // namespace torchft_ext

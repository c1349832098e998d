// torchft_ext/c.h over torchft_ext/comm.h. Nothing is thrown out of here.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "torchft_ext/c.h"
#include "torchft_ext/comm.h"
#include "torchft_ext/log.h"

using torchft_ext::Comm;
using torchft_ext::CommError;
using torchft_ext::CommOptions;
using torchft_ext::DataType;
using torchft_ext::FailurePtr;
using torchft_ext::Reduction;
using torchft_ext::Request;
using torchft_ext::Store;
using Milliseconds = std::chrono::milliseconds;

struct tft_comm {
  explicit tft_comm(const CommOptions& options) : comm(options) {}
  Comm comm;
};
struct tft_store {
  std::shared_ptr<Store> store;
};
struct tft_request {
  Request request;
};

namespace {

template <size_t Size>
void copyText(char (&to)[Size], const std::string& text) {
  const size_t length = std::min(text.size(), Size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

tft_status fill(tft_error* error, tft_status status, const std::string& message) {
  if (error == nullptr) return status;
  *error = tft_error{};
  error->status = status;
  error->rank = error->other_rank = -1;
  error->pid = error->generation = -1;
  copyText(error->message, message);
  return status;
}

tft_status fill(tft_error* error, const FailurePtr& failure) {
  if (!failure) return fill(error, TFT_OK, "");
  const auto status = static_cast<tft_status>(failure->kind);
  fill(error, status, failure->describe());
  if (error == nullptr) return status;
  error->rank = failure->cause.rank;
  error->other_rank = failure->cause.other_rank;
  error->pid = failure->cause.pid;
  error->generation = failure->generation;
  copyText(error->host, failure->cause.host);
  copyText(error->operation, failure->op);
  copyText(error->how, failure->cause.how);
  error->elapsed_ns = failure->elapsed.count();
  error->limit_ns = failure->limit.count();
  return status;
}

// call: returns a FailurePtr, or nothing.
template <typename Call>
tft_status guarded(tft_error* error, const Call& call) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
      return fill(error, TFT_OK, "");
    } else {
      return fill(error, call());
    }
  } catch (const CommError& failed) {
    return fill(error, failed.shared());
  } catch (const std::invalid_argument& refused) {
    return fill(error, TFT_INVALID_ARGUMENT, refused.what());
  } catch (const std::system_error& lacking) {
    return fill(error, TFT_SYSTEM, lacking.what());
  } catch (const std::bad_alloc&) {
    return fill(error, TFT_SYSTEM, "out of memory");
  } catch (const std::exception& wrong) {
    return fill(error, TFT_INVALID_STATE, wrong.what());
  }
}

template <typename T>
T& given(T* handle, const char* name) {
  if (handle != nullptr) return *handle;
  throw std::invalid_argument(std::string(name) + ": expected one, found NULL");
}

const char* text(const char* given_text) {
  return given_text == nullptr ? "" : given_text;
}

class CallsStore final : public Store {
 public:
  explicit CallsStore(const tft_store_calls& calls) : calls_(calls) {}
  ~CallsStore() override {
    if (calls_.release != nullptr) calls_.release(calls_.context);
  }
  CallsStore(const CallsStore&) = delete;
  CallsStore& operator=(const CallsStore&) = delete;

  void set(const std::string& key, const std::string& value) override {
    check(calls_.set(calls_.context, key.c_str(), value.data(), value.size()), "set", key);
  }
  std::optional<std::string> get(const std::string& key) override {
    std::optional<std::string> value;
    const auto found = [](void* to, const void* bytes, size_t count) {
      static_cast<std::optional<std::string>*>(to)->emplace(static_cast<const char*>(bytes), count);
    };
    check(calls_.get(calls_.context, key.c_str(), found, &value), "get", key);
    return value;
  }
  void remove(const std::string& key) override {
    check(calls_.remove(calls_.context, key.c_str()), "remove", key);
  }

 private:
  static void check(int status, const char* what, const std::string& key) {
    if (status == 0) return;
    throw std::runtime_error(std::string("the program's store: ") + what + " of '" + key +
                             "' returned " + std::to_string(status));
  }

  const tft_store_calls calls_;
};

// Issues, and waits itself where the caller takes no request.
template <typename Issue>
tft_status issue(tft_comm* comm, tft_request** request, tft_error* error, const Issue& call) {
  return guarded(error, [&]() -> FailurePtr {
    Request issued = call(given(comm, "comm").comm);
    if (request == nullptr) return issued.tryWait();
    *request = new tft_request{std::move(issued)};
    return nullptr;
  });
}

// Programs in C may give any number; to read another one than the enum has is undefined in C++.
template <typename Enum>
int numberOf(const Enum& value) {
  int number = 0;
  static_assert(sizeof number == sizeof value);
  std::memcpy(&number, &value, sizeof number);
  return number;
}
// Whether a byte's number is one that the enum has, those who use it say.
template <typename Wanted, typename Given>
Wanted oneOf(const char* what, const Given& value) {
  const int number = numberOf(value);
  if (number == static_cast<uint8_t>(number)) return static_cast<Wanted>(number);
  throw std::invalid_argument(std::string(what) + ": expected one of the enum, found " +
                              std::to_string(number));
}
DataType typeOf(const tft_type& type) {
  return oneOf<DataType>("type", type);
}
Reduction reductionOf(const tft_reduction& reduction) {
  return oneOf<Reduction>("reduction", reduction);
}

}  // namespace

size_t tft_size_of(tft_type type) {
  try {
    return torchft_ext::sizeOf(typeOf(type));
  } catch (const std::invalid_argument&) {
    return 0;
  }
}

// ---- the process

void tft_set_log_level(tft_log_level least) {
  torchft_ext::setLogLevel(static_cast<torchft_ext::LogLevel>(std::clamp(numberOf(least), 0, 3)));
}

tft_status tft_set_log_sink(void (*sink)(void* context, tft_log_level level, const char* line),
                            void* context, tft_error* error) {
  return guarded(error, [&] {
    if (sink == nullptr) return torchft_ext::setLogSink({});
    torchft_ext::setLogSink([sink, context](torchft_ext::LogLevel level, const std::string& line) {
      sink(context, static_cast<tft_log_level>(level), line.c_str());
    });
  });
}

tft_status tft_dump(const char* path, tft_error* error) {
  return guarded(error, [&] { torchft_ext::dump(&given(path, "path")); });
}

int tft_end_process(int64_t timeout_ms) {
  try {
    const bool all = timeout_ms > 0 ? torchft_ext::endProcess(Milliseconds(timeout_ms))
                                    : torchft_ext::endProcess();
    return all ? 1 : 0;
  } catch (const std::exception&) {
    return 0;
  }
}

// ---- stores

tft_status tft_store_create(const tft_store_calls* calls, tft_store** store, tft_error* error) {
  return guarded(error, [&] {
    const tft_store_calls& all = given(calls, "calls");
    if (all.set == nullptr || all.get == nullptr || all.remove == nullptr) {
      throw std::invalid_argument("calls: expected set, get and remove, found NULL");
    }
    given(store, "store") = new tft_store{std::make_shared<CallsStore>(all)};
  });
}

tft_status tft_store_create_file(const char* directory, tft_store** store, tft_error* error) {
  return guarded(error, [&] {
    given(directory, "directory");
    given(store, "store") = new tft_store{torchft_ext::makeFileStore(directory)};
  });
}

tft_status tft_store_create_memory(tft_store** store, tft_error* error) {
  return guarded(error,
                 [&] { given(store, "store") = new tft_store{torchft_ext::makeMemoryStore()}; });
}

void tft_store_destroy(tft_store* store) {
  delete store;
}

// ---- the group

tft_status tft_comm_create(const tft_options* options, tft_comm** comm, tft_error* error) {
  return guarded(error, [&] {
    CommOptions chosen;
    const tft_options none{};
    const tft_options& asked = options == nullptr ? none : *options;
    if (asked.name != nullptr) chosen.name = asked.name;
    if (asked.timeout_ms != 0) chosen.timeout = Milliseconds(asked.timeout_ms);
    chosen.interface = text(asked.interface_name);
    chosen.port_range = text(asked.port_range);
    chosen.local_sockets = asked.no_local_sockets == 0;
    if (asked.heartbeat_ms != 0) {
      chosen.heartbeat = Milliseconds(asked.heartbeat_ms == -1 ? 0 : asked.heartbeat_ms);
    }
    if (asked.ask_after_ms != 0) {
      chosen.ask_after = Milliseconds(asked.ask_after_ms == -1 ? 0 : asked.ask_after_ms);
    }
    given(comm, "comm") = new tft_comm(chosen);
  });
}

void tft_comm_destroy(tft_comm* comm) {
  delete comm;
}

tft_status tft_comm_configure(tft_comm* comm, tft_store* store, const char* prefix, int rank,
                              int size, int64_t timeout_ms, tft_error* error) {
  return guarded(error, [&] {
    return given(comm, "comm")
        .comm.tryConfigure(given(store, "store").store, text(prefix), rank, size,
                           Milliseconds(timeout_ms));
  });
}

tft_status tft_comm_abort(tft_comm* comm, const char* why, tft_error* error) {
  return guarded(
      error, [&] { given(comm, "comm").comm.abort(why == nullptr ? "abort was called" : why); });
}

tft_status tft_comm_shutdown(tft_comm* comm, int64_t timeout_ms, tft_error* error) {
  bool all = false;
  const tft_status status = guarded(error, [&] {
    Comm& group = given(comm, "comm").comm;
    all = timeout_ms != 0 ? group.shutdown(Milliseconds(timeout_ms)) : group.shutdown();
  });
  if (status != TFT_OK || all) return status;
  return fill(error, TFT_TIMEOUT, "shutdown: not all that was issued was sent by the limit");
}

tft_status tft_comm_errored(tft_comm* comm, tft_error* error) {
  return guarded(error, [&] { return given(comm, "comm").comm.errored(); });
}

tft_status tft_comm_check(tft_comm* comm, int64_t timeout_ms, tft_error* error) {
  return guarded(error, [&] { given(comm, "comm").comm.check(Milliseconds(timeout_ms)); });
}

int tft_comm_rank(const tft_comm* comm) {
  return comm == nullptr ? -1 : comm->comm.rank();
}

int tft_comm_size(const tft_comm* comm) {
  return comm == nullptr ? -1 : comm->comm.size();
}

int64_t tft_comm_generation(const tft_comm* comm) {
  return comm == nullptr ? -1 : comm->comm.generation();
}

tft_status tft_comm_set_timeout(tft_comm* comm, int64_t timeout_ms, tft_error* error) {
  return guarded(error, [&] { given(comm, "comm").comm.setTimeout(Milliseconds(timeout_ms)); });
}

tft_status tft_comm_stats(const tft_comm* comm, tft_stats* stats, tft_error* error) {
  return guarded(error, [&] {
    const torchft_ext::CommStats found = given(comm, "comm").comm.stats();
    tft_stats& told = given(stats, "stats");
    told = tft_stats{};
    told.generations = found.generations;
    told.failed_configures = found.failed_configures;
    told.operations = found.operations;
    told.bytes_sent = found.bytes_sent;
    told.bytes_received = found.bytes_received;
    fill(&told.last_failure, found.last_failure);
    for (const auto& [name, took] : found.last_configure) {
      if (static_cast<size_t>(told.phases) == std::size(told.last_configure)) break;
      tft_phase& phase = told.last_configure[told.phases++];
      copyText(phase.name, name);
      phase.took_ns = took.count();
    }
  });
}

tft_status tft_comm_on_failure(tft_comm* comm,
                               void (*callback)(void* context, const tft_error* failure),
                               void* context, tft_error* error) {
  return guarded(error, [&] {
    Comm& group = given(comm, "comm").comm;
    if (callback == nullptr) return group.onFailure({});
    group.onFailure([callback, context](const FailurePtr& failure) {
      tft_error told;
      fill(&told, failure);
      callback(context, &told);
    });
  });
}

// ---- operations

tft_status tft_allreduce(tft_comm* comm, void* data, size_t count, tft_type type,
                         tft_reduction reduction, int64_t timeout_ms, tft_request** request,
                         tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.allreduce(data, count, typeOf(type), reductionOf(reduction),
                           Milliseconds(timeout_ms));
  });
}

tft_status tft_broadcast(tft_comm* comm, void* data, size_t count, tft_type type, int root,
                         int64_t timeout_ms, tft_request** request, tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.broadcast(data, count, typeOf(type), root, Milliseconds(timeout_ms));
  });
}

tft_status tft_allgather(tft_comm* comm, const void* input, void* all, size_t count, tft_type type,
                         int64_t timeout_ms, tft_request** request, tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.allgather(input, all, count, typeOf(type), Milliseconds(timeout_ms));
  });
}

tft_status tft_reduce_scatter(tft_comm* comm, const void* all, void* output, size_t count,
                              tft_type type, tft_reduction reduction, int64_t timeout_ms,
                              tft_request** request, tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.reduceScatter(all, output, count, typeOf(type), reductionOf(reduction),
                               Milliseconds(timeout_ms));
  });
}

tft_status tft_reduce(tft_comm* comm, const void* input, void* output, size_t count, tft_type type,
                      tft_reduction reduction, int root, int64_t timeout_ms, tft_request** request,
                      tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.reduce(input, output, count, typeOf(type), reductionOf(reduction), root,
                        Milliseconds(timeout_ms));
  });
}

tft_status tft_gather(tft_comm* comm, const void* input, void* all, size_t count, tft_type type,
                      int root, int64_t timeout_ms, tft_request** request, tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.gather(input, all, count, typeOf(type), root, Milliseconds(timeout_ms));
  });
}

tft_status tft_scatter(tft_comm* comm, const void* all, void* output, size_t count, tft_type type,
                       int root, int64_t timeout_ms, tft_request** request, tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.scatter(all, output, count, typeOf(type), root, Milliseconds(timeout_ms));
  });
}

tft_status tft_alltoall(tft_comm* comm, const void* all_inputs, void* all_outputs, size_t count,
                        tft_type type, int64_t timeout_ms, tft_request** request,
                        tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.alltoall(all_inputs, all_outputs, count, typeOf(type), Milliseconds(timeout_ms));
  });
}

tft_status tft_barrier(tft_comm* comm, int64_t timeout_ms, tft_request** request,
                       tft_error* error) {
  return issue(comm, request, error,
               [&](Comm& group) { return group.barrier(Milliseconds(timeout_ms)); });
}

tft_status tft_send(tft_comm* comm, const void* data, size_t count, tft_type type, int destination,
                    int tag, int64_t timeout_ms, tft_request** request, tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.send(data, count, typeOf(type), destination, tag, Milliseconds(timeout_ms));
  });
}

tft_status tft_recv(tft_comm* comm, void* data, size_t count, tft_type type, int source, int tag,
                    int64_t timeout_ms, tft_request** request, tft_error* error) {
  return issue(comm, request, error, [&](Comm& group) {
    return group.recv(data, count, typeOf(type), source, tag, Milliseconds(timeout_ms));
  });
}

tft_status tft_request_wait(tft_request* request, tft_error* error) {
  return guarded(error, [&] { return given(request, "request").request.tryWait(); });
}

int tft_request_done(const tft_request* request) {
  return request == nullptr || request->request.done() ? 1 : 0;
}

tft_status tft_request_failure(const tft_request* request, tft_error* error) {
  return guarded(error, [&] { return given(request, "request").request.failure(); });
}

int tft_request_source(const tft_request* request) {
  return request == nullptr ? -1 : request->request.source();
}

void tft_request_destroy(tft_request* request) {
  delete request;
}

const char* tft_version(void) {
  return TORCHFT_EXT_VERSION;
}

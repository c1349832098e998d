#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>

#include "base/log.h"
#include "c10d/group/engines.h"
#include "c10d/group/failed_init.h"
#include "c10d/group/ft_backend.h"
#include "c10d/group/ft_process_group.h"
#include "c10d/group/group_making.h"
#include "c10d/store/store_adapter.h"
#include "c10d/work/comm_error.h"
#include "c10d/work/compile_questions.h"
#include "python/bindings.h"
#include "python/callback_future.h"
#include "python/docstrings.h"
#include "python/error_objects.h"
#include "python/group_stats.h"
#include "python/limits.h"
#include "python/mem_pools.h"
#include "python/plain_values.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

using Milliseconds = std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<FtBackend>;
using NoGil = py::call_guard<py::gil_scoped_release>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

GroupSpec specOf(const StorePtr& store, int rank, int size, std::optional<Milliseconds> timeout,
                 const std::string& engine, const std::string& name,
                 const c10::intrusive_ptr<FtOptions>& options,
                 const std::optional<std::string>& bound_device) {
  GroupSpec spec;
  spec.store = store;
  spec.rank = rank;
  spec.size = size;
  spec.engine = engine;
  spec.name = name;
  // A copy: the caller may give one object to several groups, and each changes its own.
  spec.options =
      options ? c10::make_intrusive<FtOptions>(*options) : c10::make_intrusive<FtOptions>();
  spec.timeout = timeout.value_or(Milliseconds(0));
  if (bound_device) spec.bound_device = c10::Device(*bound_device);
  return spec;
}

// Once in a process.
void tellThatItReplaces(const std::string& backend_name) {
  static std::atomic<bool> told{false};
  if (backend_name == "ft" || told.exchange(true)) return;
  log(LogLevel::kInfo, "groups that are asked for with '" + backend_name +
                           "' are groups of torchft_ext: TORCHFT_EXT_REPLACE_GLOO=1 or "
                           "replace_gloo() says so");
}

BackendPtr createBackend(const StorePtr& store, int rank, int size, const py::object& timeout,
                         const std::string& engine, const std::string& name,
                         const c10::intrusive_ptr<FtOptions>& options, bool may_resize, bool begin,
                         const std::optional<std::string>& bound_device, BackendPtr beside,
                         std::vector<int> ranks_beside, const std::string& backend_name) {
  const auto limit = optionalLimitOf("_create_backend: timeout", timeout);
  const py::gil_scoped_release no_gil;
  tellThatItReplaces(backend_name);
  GroupSpec spec = specOf(store, rank, size, limit, engine, name, options, bound_device);
  spec.backend_name = backend_name;
  spec.may_resize = may_resize;
  spec.begin = begin;
  spec.beside = std::move(beside);
  spec.ranks_beside = std::move(ranks_beside);
  return makeBackend(spec);
}

ProcessGroupPtr makeOwnGroup(const StorePtr& store, const py::object& rank,
                             const py::object& world_size, const py::object& timeout,
                             const std::string& engine, const std::string& name,
                             const c10::intrusive_ptr<FtOptions>& options,
                             const std::optional<std::string>& bound_device, BackendPtr beside,
                             std::vector<int> ranks_beside, bool by_rule) {
  const int own_rank = numberOf("make_group: rank", rank);
  const int size = numberOf("make_group: world_size", world_size);
  const auto limit = optionalLimitOf("make_group: timeout", timeout);
  TORCH_CHECK_VALUE(!limit || limit->count() > 0,
                    "make_group: timeout: expected a positive time, found ",
                    limit.value_or(Milliseconds(0)).count(), " ms");
  const py::gil_scoped_release no_gil;
  GroupSpec spec = specOf(store, own_rank, size, limit, engine, name, options, bound_device);
  spec.caller = "make_group";
  spec.beside = std::move(beside);
  spec.ranks_beside = std::move(ranks_beside);
  spec.by_rule = by_rule;
  return makeGroup(spec);
}

void publishFailedInitAt(const StorePtr& store, int rank, int size, const std::string& why) {
  publishFailedInit(store, rank, size, Duration::max(), why);
}

// As torch's own class, which torch.distributed asks for by identity (batch_isend_irecv does).
c10::intrusive_ptr<c10d::ProcessGroup> createGroup(const StorePtr& store, const BackendPtr& backend,
                                                   const std::vector<std::string>& devices) {
  std::vector<c10::DeviceType> types;
  types.reserve(devices.size());
  for (const std::string& device : devices) types.push_back(c10::Device(device).type());
  // Of a group whose device tensors go through host memory torch was told nothing of the device.
  const auto& staged = backend->devices().staged();
  if (staged && std::find(types.begin(), types.end(), staged->type()) == types.end())
    types.push_back(staged->type());
  return c10::make_intrusive<FtProcessGroup>(store, backend, types);
}

// The tables of torch.distributed are Python's, so Python brings them up to date.
void configure(const py::object& self, const py::object& store_addr, const py::object& rank,
               const py::object& world_size, const py::object& timeout) {
  const std::string address = textOf("configure: store_addr", store_addr);
  const int new_rank = numberOf("configure: rank", rank);
  const int new_size = numberOf("configure: world_size", world_size);
  const std::optional<Milliseconds> limit = optionalLimitOf("configure: timeout", timeout);
  auto backend = self.cast<BackendPtr>();
  {
    const py::gil_scoped_release no_gil;
    backend->configure(address, new_rank, new_size, limit);
  }
  py::module_::import("torchft_ext._groups").attr("follow_generation")(self);
}

// Over any store, for callers that have checked the numbers and bring the tables up to date. Of
// members that have these ranks in the generation of another group: so the death of one is known.
void configureOver(FtBackend& backend, const StorePtr& store, int rank, int size,
                   Milliseconds timeout, const FtBackend& beside, const std::vector<int>& ranks) {
  backend.expectMembersOf(beside, ranks);
  const StorePlace place = storePlaceOf(store);
  const FailurePtr failure = backend.tryForm({place.thread, place.prefix}, rank, size, timeout);
  if (failure) throwFailure(failure);
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
c10::intrusive_ptr<c10d::Work> reconfigure(const py::object& backend,
                                           const c10d::ReconfigureOptions& options) {
  auto native = backend.cast<BackendPtr>();
  c10::intrusive_ptr<c10d::Work> work;
  {
    const py::gil_scoped_release no_gil;
    work = native->reconfigure(options);
  }
  py::module_::import("torchft_ext._groups").attr("follow_generation")(backend);
  return work;
}
#endif

py::object errored(FtBackend& backend) {
  FailurePtr failure;
  {
    const py::gil_scoped_release no_gil;
    failure = backend.errored();
  }
  return errorObject(failure);
}

py::dict statsOf(FtBackend& backend) {
  GroupStats stats;
  ThreadSnapshot snapshot;
  int descriptors = 0;
  {
    const py::gil_scoped_release no_gil;
    stats = backend.stats();
    snapshot = threadSnapshot();
    descriptors = openDescriptors();
  }
  py::dict phases;
  for (const auto& [phase, duration] : stats.last_configure)
    phases[py::str(phase)] = toMilliseconds(duration);
  py::dict result;
  result["generations"] = stats.generations;
  result["failed_configures"] = stats.failed_configures;
  result["operations"] = stats.operations;
  result["bytes_sent"] = stats.bytes_sent;
  result["bytes_received"] = stats.bytes_received;
  result["failures"] = failuresOf(stats);
  result["waited_for"] = waitedForOf(stats);
  result["why_over_sockets"] = stats.why_over_sockets.empty()
                                   ? py::object(py::none())
                                   : py::object(py::str(stats.why_over_sockets));
  result["last_error"] = stats.last_failure ? py::object(py::str(stats.last_failure->describe()))
                                            : py::object(py::none());
  result["last_configure_ms"] = phases;
  result["threads"] = snapshot.running;
  result["stuck_threads"] = snapshot.stuck;
  result["descriptors"] = descriptors;
  addCounters(*backend.engine(), result);
  return result;
}

void registerMemPool(FtBackend& backend, const py::object& pool, const py::object& symm) {
  const char* const operation = "register_mem_pool";
  TORCH_CHECK_NOT_IMPLEMENTED(!switchOf("register_mem_pool: symm", symm),
                              "register_mem_pool: symm: expected False, found True: symmetric "
                              "memory is not supported, since "
                              "live peers could still write into it after an abort() here");
  MemoryPool found = poolOf(operation, pool);
  const py::gil_scoped_release no_gil;
  backend.registerMemPool(std::move(found));
}

void deregisterMemPool(FtBackend& backend, const py::object& pool) {
  const PoolId id = poolIdOf("deregister_mem_pool", pool);
  const py::gil_scoped_release no_gil;
  backend.deregisterMemPool(id);
}

std::vector<std::string> incarnationsOf(const FtBackend& backend, bool before) {
  std::vector<std::string> incarnations;
  for (const Incarnation& one : backend.incarnations(before)) incarnations.push_back(one.hex());
  return incarnations;
}

// Of the members of that generation; one at a time. Does not hold the group.
class MemberWatch {
 public:
  MemberWatch(FtBackend& backend, int64_t generation) {
    Operation watch;
    watch.generation = generation;
    watch.kind = OpKind::kRecv;
    watch.watches = true;
    watch.timeout = std::chrono::hours(24 * 365 * 200);  // no deadline
    state_ = backend.group().issue(std::move(watch));
  }
  // Blocks until a member leaves, which no earlier watch has told of and which leaves the
  // generation as it is, or until that ends; raises what it was.
  void wait() const {
    state_->wait(Deadline::never());
    auto told = std::make_shared<Failure>(*state_->failure());
    told->op.clear();
    told->seq = OpState::kNoSeq;
    throwFailure(told);
  }

 private:
  std::shared_ptr<OpState> state_;
};

}  // namespace

void bind_backend(py::module_& module) {
  py::class_<FtBackend, c10d::Backend, BackendPtr> backend(module, "Backend", docs::Backend::about);
  py::class_<MemberWatch>(module, "_MemberWatch")
      .def(py::init<FtBackend&, int64_t>(), py::arg("backend"), py::arg("generation"), NoGil())
      .def("wait", &MemberWatch::wait, NoGil());
  backend
      .def("configure", &configure, py::arg("store_addr"), py::arg("rank"), py::arg("world_size"),
           py::kw_only(), py::arg("timeout") = py::none(), docs::Backend::configure)
      .def(
          "abort",
          [](FtBackend& self, const py::object& why) {
            const std::string reason = textOf("abort: why", why);
            const py::gil_scoped_release no_gil;
            self.abort(reason);
          },
          py::arg("why") = "abort() was called", docs::Backend::abort)
      .def("get_error", &FtBackend::getError, NoGil(), docs::Backend::get_error)
      .def("errored", &errored, docs::Backend::errored)
      .def(
          "check",
          [](FtBackend& self, const py::object& timeout) {
            const auto limit = optionalLimitOf("check: timeout", timeout);
            const py::gil_scoped_release no_gil;
            self.check(limit);
          },
          py::arg("timeout") = py::none(), docs::Backend::check)
      .def(
          "set_timeout",
          [](FtBackend& self, const py::object& timeout) {
            const Milliseconds limit = limitOf("set_timeout: timeout", timeout);
            const py::gil_scoped_release no_gil;
            self.setTimeout(limit);
          },
          py::arg("timeout"), docs::Backend::set_timeout)
      .def("shutdown", &FtBackend::shutdown, NoGil(), docs::Backend::shutdown)
      // torch's own binding of it may hold the GIL.
      .def("shrink", &FtBackend::shrink, py::arg("ranks_to_exclude"), py::arg("shrink_flags") = 0,
           py::arg("opts_override") = c10::intrusive_ptr<c10d::Backend::Options>(), NoGil(),
           docs::Backend::shrink)
      .def("rank", &FtBackend::currentRank, NoGil(), docs::Backend::rank)
      .def("size", &FtBackend::currentSize, NoGil(), docs::Backend::size)
      .def("stats", &statsOf, docs::Backend::stats)
      .def("register_mem_pool", &registerMemPool, py::arg("pool"), py::arg("symm") = false,
           docs::Backend::register_mem_pool)
      .def("deregister_mem_pool", &deregisterMemPool, py::arg("pool"),
           docs::Backend::deregister_mem_pool)
      // By rank in the generation. The tables of torch.distributed are written after them.
      .def("_reopen", &FtBackend::reopen, NoGil())
      .def("_say_own_name", &FtBackend::sayOwnName, py::arg("own"))
      .def("_incarnations", &incarnationsOf, py::kw_only(), py::arg("before") = false)
      .def(
          "_abort_generation",
          [](FtBackend& self, int64_t generation, const std::string& why) {
            self.group().abortGeneration(generation, why);
          },
          py::arg("generation"), py::arg("why"), NoGil())
      .def("_configure_over", &configureOver, py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout"), py::arg("beside"), py::arg("ranks_beside"), NoGil())
      // torch copies them for groups that it splits off.
      .def_property_readonly("options", &FtBackend::getBackendOptions, docs::Backend::options)
      .def_property_readonly("generation", &FtBackend::generation, docs::Backend::generation)
      .def_property_readonly(
          "group_name", [](const FtBackend& self) { return self.groupName(); },
          docs::Backend::group_name);

  bind_future(module);
  py::class_<FtWork, c10d::Work, c10::intrusive_ptr<FtWork>>(module, "Work", docs::Work::about)
      .def("get_future", &futureOf, docs::Work::get_future)
      .def("check", &FtWork::check, NoGil(), docs::Work::check)
      // torch's own holds the GIL, which the engine may need to let go of a tensor.
      .def("synchronize", &FtWork::synchronize, NoGil(), docs::Work::synchronize);

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // c10d's own, and the tables of torch.distributed after it. Before, the group is torch's own
  // class to Python: batch_isend_irecv() asks for exactly that.
  backend.def("reconfigure", &reconfigure, py::arg("opts"));
  py::class_<FtProcessGroup, c10d::ProcessGroup, c10::intrusive_ptr<FtProcessGroup>> group(
      module, "_ReconfigurableGroup", docs::_ReconfigurableGroup::about);
  group.def(
      "reconfigure",
      [](const FtProcessGroup& self, const c10d::ReconfigureOptions& options) {
        return reconfigure(py::cast(self.backend()), options);
      },
      py::arg("opts"));
#endif

  module.def("_create_backend", &createBackend, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::kw_only(), py::arg("timeout"), py::arg("engine"), py::arg("name"),
             py::arg("options"), py::arg("may_resize"), py::arg("begin"),
             py::arg("bound_device") = py::none(), py::arg("beside") = py::none(),
             py::arg("ranks_beside") = std::vector<int>(), py::arg("backend_name") = "ft");
  module.def("_make_group", &makeOwnGroup, py::arg("store"), py::arg("rank"), py::arg("world_size"),
             py::kw_only(), py::arg("timeout"), py::arg("engine"), py::arg("name"),
             py::arg("options"), py::arg("bound_device") = py::none(),
             py::arg("beside") = py::none(), py::arg("ranks_beside") = std::vector<int>(),
             py::arg("by_rule") = false);
  module.def("_engine_names", &engineNames);
  module.def("_publish_failed_init", &publishFailedInitAt, py::arg("store"), py::arg("rank"),
             py::arg("size"), py::arg("why"), NoGil());
  py::class_<CompileQuestions, std::shared_ptr<CompileQuestions>>(module, "_CompileQuestions")
      // With the GIL: torch looks through its guards under it. It waits for a group's lock alone,
      // under which nobody waits.
      .def("hold", &CompileQuestions::hold)
      .def("asked_for_rank", &CompileQuestions::askedForRank);
  module.def("_begin_compile_questions", &CompileQuestions::begin);
  module.def("_end_compile_questions", &CompileQuestions::end);
  module.def("_compile_questions", &CompileQuestions::taken);
  module.def("_ask_aside", &CompileQuestions::setAside, py::arg("begins"));
  module.def("_create_group", &createGroup, py::arg("store"), py::arg("backend"),
             py::arg("devices"), NoGil());
}

}  // namespace torchft_ext

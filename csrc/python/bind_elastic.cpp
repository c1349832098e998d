#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d/group/elastic_job.h"
#include "python/bindings.h"
#include "python/error_objects.h"
#include "python/job_state.h"
#include "python/limits.h"
#include "python/sampled_bits.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

using JobPtr = std::shared_ptr<ElasticJob>;
// Tells a process that it leaves, also one that is still joining.
struct LeaveFlag {
  std::shared_ptr<std::atomic<bool>> told = std::make_shared<std::atomic<bool>>(false);
};
using NoGil = py::call_guard<py::gil_scoped_release>;

const char* classFor(ElasticErrorKind kind) {
  switch (kind) {
    case ElasticErrorKind::kNoQuorum:
      return "NoQuorumError";
    case ElasticErrorKind::kLeftOut:
      return "LeftOutError";
    case ElasticErrorKind::kNoProgress:
      return "NoProgressError";
    case ElasticErrorKind::kTimeout:
      return "ElasticTimeoutError";
    case ElasticErrorKind::kJobOver:
      return "JobOverError";
    default:
      return "ElasticError";
  }
}

FailureKind kindNamed(const std::string& name) {
  for (auto kind = FailureKind::kPeerLost; kind != FailureKind::kInternal;
       kind = static_cast<FailureKind>(static_cast<uint8_t>(kind) + 1)) {
    if (name == nameOf(kind)) return kind;
  }
  return FailureKind::kInternal;
}

void cameToNothing(ElasticJob& job, const std::string& kind, const std::string& how,
                   const std::string& description) {
  const FailureKind found = kindNamed(kind);
  const py::gil_scoped_release no_gil;
  job.cameToNothing(found, how, description);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11 gives the signature
void translateElastic(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const JobOverError& over) {
    const py::module_ errors = py::module_::import("torchft_ext.elastic._errors");
    using std::chrono::duration_cast;
    const auto ended = duration_cast<std::chrono::seconds>(over.endedAt().time_since_epoch());
    const py::object type = errors.attr(classFor(over.kind()));
    const py::object made = type(textOf(over.what()), ended.count(), over.members());
    PyErr_SetObject(type.ptr(), made.ptr());
  } catch (const ElasticError& elastic) {
    const py::module_ errors = py::module_::import("torchft_ext.elastic._errors");
    const py::object type = errors.attr(classFor(elastic.kind()));
    const py::str text = textOf(elastic.what());
    PyErr_SetObject(type.ptr(), text.ptr());
  }
}

std::vector<std::string> hexOfAll(const std::vector<MemberId>& ids) {
  std::vector<std::string> texts;
  texts.reserve(ids.size());
  for (const MemberId& id : ids) texts.push_back(id.hex());
  return texts;
}

py::dict viewDict(const View& view, const MemberId& self) {
  std::vector<std::string> members;
  std::vector<bool> continuing;
  for (const Member& member : view.members) {
    members.push_back(member.id.hex());
    continuing.push_back(view.number > 1 && member.since < view.number);
  }
  py::dict result;
  result["number"] = view.number;
  result["lineage"] = py::bytes(reinterpret_cast<const char*>(view.lineage.bytes.data()),
                                view.lineage.bytes.size());
  const int rank = view.rankOf(self);
  result["rank"] = rank;
  result["founder"] = rank >= 0 && view.members[static_cast<size_t>(rank)].since == 1;
  result["size"] = view.members.size();
  result["old_size"] = view.old_size;
  result["members"] = py::tuple(py::cast(members));
  result["members_continuing"] = py::tuple(py::cast(continuing));
  return result;
}

// Its end takes up to seconds, and whoever drops the last reference may hold the GIL.
JobPtr endingWithoutGil(JobPtr job) {
  ElasticJob* raw = job.get();
  return JobPtr(raw, [held = std::move(job)](ElasticJob*) mutable {
    if (PyGILState_Check() == 0) return held.reset();
    const py::gil_scoped_release no_gil;
    held.reset();
  });
}

JobPtr join(const std::string& address, int size, int min_size, int max_size, bool store_rule,
            const py::object& limit, const py::object& timeout,
            const std::optional<std::string>& interface,
            const std::optional<std::string>& port_range, const std::vector<std::string>& members,
            const std::string& key, const std::string& listen, const LeaveFlag& leaving,
            const py::object& backoff) {
  ElasticJobOptions options;
  options.address = address;
  options.size = size;
  options.min_size = min_size;
  options.max_size = max_size;
  options.store_rule = store_rule;
  options.limit = limitOf("elastic.join: limit", limit);
  options.network.interface = interface;
  options.network.port_range = port_range;
  options.members = members;
  options.key = key;
  options.listen = listen;
  if (!backoff.is_none()) options.backoff = limitOf("elastic.join: backoff", backoff);
  const auto within = limitOf("elastic.join: timeout", timeout);
  const py::gil_scoped_release no_gil;
  return endingWithoutGil(ElasticJob::join(options, within, leaving.told));
}

py::tuple recover(ElasticJob& job, const py::object& timeout, const py::object& patience,
                  bool without_quorum) {
  const auto within = limitOf("recover: timeout", timeout);
  const auto with_absent = optionalLimitOf("recover: patience", patience);
  ElasticJob::Formed formed;
  {
    const py::gil_scoped_release no_gil;
    formed = job.recover(within, with_absent, without_quorum);
  }
  py::dict phases;
  for (const auto& [phase, duration] : formed.phases) phases[phase.c_str()] = duration;
  return py::make_tuple(viewDict(formed.view, job.member().id()), phases);
}

void logView(ElasticJob& job, const py::dict& phases) {
  ElasticJob::Phases all;
  for (const auto& [name, duration] : phases) {
    all.emplace_back(name.cast<std::string>(), duration.cast<std::chrono::microseconds>());
  }
  job.logView(all);
}

py::dict agree(ElasticJob& job, bool ok, const std::string& note, const py::object& timeout,
               const std::string& common, const std::string& of_shard, uint32_t shard, bool last) {
  const auto within = limitOf("agree: timeout", timeout);
  Vote vote;
  vote.ok = ok;
  vote.last = last;
  vote.note = note;
  vote.digest = {common, shard, of_shard};
  Answer answer;
  {
    const py::gil_scoped_release no_gil;
    answer = job.agree(std::move(vote), within);
  }
  py::dict notes;
  for (const auto& [member, said] : answer.notes) notes[member.hex().c_str()] = py::bytes(said);
  py::dict result;
  result["ok"] = answer.ok;
  result["notes"] = notes;
  result["waiting"] = hexOfAll(answer.waiting);
  result["leaving"] = hexOfAll(answer.leaving);
  result["new_witness"] = answer.new_witness;
  result["diverged"] = answer.diverged;
  result["last"] = answer.last;
  return result;
}

std::string nameOfMember(ElasticJob& job, const std::string& hex) {
  const auto id = MemberId::fromHex(hex);
  return id ? job.member().nameOf(*id) : "";
}

py::dict inquire(const std::string& address, const std::vector<std::string>& members,
                 const std::string& key, const py::object& timeout) {
  ElasticJobOptions options;
  options.address = address;
  options.members = members;
  options.key = key;
  const auto within = limitOf("elastic status: timeout", timeout);
  JobState state;
  {
    const py::gil_scoped_release no_gil;
    state = ElasticJob::inquire(options, within);
  }
  return dictOf(state);
}

}  // namespace

void bind_elastic(py::module_& module) {
  py::register_local_exception_translator(&translateElastic);
  module.def(
      "_sampled_bits",
      [](const py::sequence& tensors, uint64_t seed, bool of_gradients) {
        return py::bytes(sampledBits(tensors, seed, of_gradients));
      },
      py::arg("tensors"), py::arg("seed"), py::arg("of_gradients"));
  py::class_<LeaveFlag>(module, "_LeaveFlag")
      .def(py::init<>())
      .def("set", [](LeaveFlag& flag) { flag.told->store(true); })
      .def("is_set", [](LeaveFlag& flag) { return flag.told->load(); });
  module.def("_job_state", &inquire, py::kw_only(), py::arg("address"), py::arg("members"),
             py::arg("key"), py::arg("timeout"));
  py::class_<ElasticJob, JobPtr>(module, "_ElasticJob")
      .def_static("join", &join, py::arg("address"), py::kw_only(), py::arg("size"),
                  py::arg("min_size"), py::arg("max_size"), py::arg("store_rule"), py::arg("limit"),
                  py::arg("timeout"), py::arg("interface"), py::arg("port_range"),
                  py::arg("members"), py::arg("key"), py::arg("listen"), py::arg("leaving"),
                  py::arg("backoff") = py::none())
      .def("interface_name", &ElasticJob::interfaceName)
      .def("id", [](ElasticJob& job) { return job.member().id().hex(); })
      .def("manage", &ElasticJob::manage, py::arg("name"), py::arg("backends"), NoGil())
      .def("recover", &recover, py::arg("timeout"), py::arg("patience"),
           py::arg("without_quorum") = false)
      .def("adopt", &ElasticJob::adopt, py::arg("backend"), NoGil())
      .def("came_to_nothing", &cameToNothing, py::arg("kind"), py::arg("how"), py::arg("cause"))
      .def("log_view", &logView, py::arg("phases"))
      .def("log", &ElasticJob::logLine, py::arg("line"))
      .def("agree", &agree, py::arg("ok"), py::arg("note"), py::arg("timeout"),
           py::arg("common") = py::bytes(), py::arg("of_shard") = py::bytes(), py::arg("shard") = 0,
           py::arg("last") = false)
      .def("abort", &ElasticJob::abort, py::arg("why"), NoGil())
      .def("formed_view", &ElasticJob::formedView)
      .def("is_over", [](ElasticJob& job) { return job.member().isOver(job.formedView()); })
      .def("store_of", &ElasticJob::storeOf, py::arg("view"))
      .def("min_size", [](ElasticJob& job) { return job.member().rules().min_size; })
      .def("waiting", [](ElasticJob& job) { return job.member().waiting(); })
      .def("name_of", &nameOfMember, py::arg("member"))
      .def("set_shard", &ElasticJob::setShard, py::arg("shard"))
      .def(
          "set_sole_holders",
          [](ElasticJob& job, const std::vector<int>& ranks, const py::object& patience) {
            job.setSoleHolders(ranks, limitOf("await_frozen: patience", patience));
          },
          py::arg("ranks"), py::arg("patience"))
      .def(
          "record_end",
          [](ElasticJob& job, std::chrono::milliseconds within) {
            return job.recordEnd(Deadline::after(within));
          },
          py::arg("timeout"), NoGil())
      .def(
          "note_steps",
          [](ElasticJob& job, uint64_t committed) { job.member().noteSteps(committed); },
          py::arg("committed"))
      .def("set_leaving", &ElasticJob::setLeaving, NoGil())
      .def(
          "leave",
          [](ElasticJob& job, std::chrono::milliseconds within) {
            return job.leave(Deadline::after(within));
          },
          py::arg("timeout"), NoGil());
}

}  // namespace torchft_ext

#include "python/job_state.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "membership/records.h"
#include "python/error_objects.h"

namespace py = pybind11;

namespace torchft_ext {
namespace {

double secondsOf(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

py::list textsOf(const std::vector<std::string>& texts) {
  py::list result;
  for (const std::string& text : texts) result.append(textOf(text));
  return result;
}

void addRecord(py::dict& result, const Member& member) {
  const auto record = decodeRecord(member.record);
  result["id"] = member.id.hex();
  result["host"] = textOf(record ? record->host : "unknown");
  result["pid"] = record ? record->pid : -1;
}

// None: it was not asked, or reported itself.
py::object heardOf(const JobState& state, const MemberId& id) {
  const auto found = state.heard.find(id);
  if (found == state.heard.end() || found->second.liveness == Liveness::kUnknown) return py::none();
  return py::bool_(found->second.liveness == Liveness::kAlive);
}

py::dict memberDict(const JobState& state, const ReportedMember& one) {
  py::dict result;
  addRecord(result, one.member);
  result["since_view"] = one.member.since;
  result["seconds"] = secondsOf(one.present);
  result["voter"] = one.is_voter;
  result["may_be_lost"] = one.may_be_lost;
  result["trouble"] = textOf(one.trouble);
  result["answers"] =
      one.member.id == state.report->self.id ? py::bool_(true) : heardOf(state, one.member.id);
  return result;
}

py::list membersOf(const JobState& state, const std::vector<ReportedMember>& members) {
  py::list result;
  for (const ReportedMember& one : members) result.append(memberDict(state, one));
  return result;
}

py::list changesOf(const JobReport& report) {
  py::list result;
  for (const ReportedChange& change : report.changes) {
    py::dict one;
    one["view"] = change.view;
    one["size"] = change.size;
    one["seconds_ago"] = secondsOf(change.ago);
    one["joined"] = textsOf(change.joined);
    one["gone"] = textsOf(change.gone);
    py::dict phases;
    for (const auto& [phase, took] : change.phases) phases[textOf(phase)] = secondsOf(took);
    one["phases"] = phases;
    result.append(one);
  }
  return result;
}

py::object stepsOf(const JobReport& report) {
  if (!report.steps) return py::none();
  py::dict steps;
  steps["committed"] = report.steps->committed;
  steps["seconds_ago"] = secondsOf(report.steps->ago);
  steps["per_second"] = report.steps->per_second;
  return steps;
}

const char* nameOf(ReportedBy by) {
  switch (by) {
    case ReportedBy::kMember:
      return "member";
    case ReportedBy::kLeftOut:
      return "left out";
    default:
      return "newcomer";
  }
}

py::object reportOf(const JobState& state) {
  if (!state.report) return py::none();
  const JobReport& report = *state.report;
  py::dict result;
  py::dict by;
  addRecord(by, report.self);
  result["by"] = by;
  result["by_role"] = nameOf(report.by);
  result["lineage"] = report.lineage.hex();
  result["view"] = report.view;
  result["deciding"] = report.deciding;
  result["rule"] = report.store_rule ? "store" : "members";
  result["min_size"] = report.min_size;
  result["max_size"] = report.max_size;
  result["witness"] = !report.witness.isZero();
  result["size"] = report.size;
  result["may_lose"] = report.may_lose;
  result["members"] = membersOf(state, report.members);
  result["waiting"] = membersOf(state, report.waiting);
  result["changes"] = changesOf(report);
  result["waits"] = textsOf(report.waits);
  result["steps"] = stepsOf(report);
  return result;
}

py::dict meetingOf(const JobState& state) {
  const MeetingState& meeting = state.meeting;
  py::dict result;
  result["trouble"] = textOf(meeting.trouble);
  result["founded"] = meeting.founding.has_value();
  result["come"] = meeting.come;
  result["founders"] = meeting.founding ? meeting.founding->view.members.size() : 0;
  result["contacts"] = meeting.contacts.size();
  const bool known = meeting.register_now.has_value();
  result["voted_for"] = known ? py::object(py::int_(meeting.register_now->voted_for)) : py::none();
  const bool is_witness =
      known && state.report && state.report->witness == meeting.register_now->identity;
  result["is_witness"] = is_witness;
  return result;
}

}  // namespace

py::dict dictOf(const JobState& state) {
  py::list silent;
  for (const auto& [member, why] : state.silent) {
    py::dict one;
    addRecord(one, member);
    one["why"] = textOf(why);
    silent.append(one);
  }
  py::dict result;
  result["meeting"] = meetingOf(state);
  result["report"] = reportOf(state);
  result["silent"] = silent;
  return result;
}

}  // namespace torchft_ext

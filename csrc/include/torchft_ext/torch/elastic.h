// Elastic jobs for C++ programs on libtorch: the members agree among themselves who goes on, and
// whether a step counts. The same code, and the same protocol, as Python's torchft_ext.elastic;
// C++ and Python processes can be members of one job.
//
//   auto job = torchft_ext::elastic::Job::join({.address = "host0:29500/job7", .size = 4});
//   auto group = torchft_ext::elastic::makeLocalGroup();   // of one, until the first view
//   job->manage("default", group);
//   auto view = job->recover();
//   while (step < steps) {
//     bool ok = computeGradients(group);                    // false: it threw a CommError
//     const auto answer = job->agree(ok);
//     if (answer.ok) optimizer.step(), job->countSteps(++step);  // on all members, or on none
//     if (job->isOver() || answer.changes()) view = job->recover(), bringUpToDate(view, group);
//   }
//   job->end();
//   job->leave();
//
// Threads: every method from any thread, but agree() and recover() from one at a time. A Job may be
// destroyed at any time: the others take it for dead; leave() says goodbye instead.
// Errors: ElasticError (torchft_ext/elastic_error.h) for what the job decides; CommError for a
// generation that could not be formed by the deadline; c10::ValueError for bad arguments.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torchft_ext/elastic_error.h"
#include "torchft_ext/torch/process_group.h"

namespace torchft_ext {

class ElasticJob;

namespace elastic {

// Those of Python's elastic.join(), which says more of each, with the same defaults, except `size`,
// which has none there. Python's `backend`, `wait` and `on_no_quorum` are not here: a program makes
// its groups itself, calls recover() for the first view, and decides on its own what a NoQuorum
// error means (RecoverOptions::without_quorum).
struct JoinOptions {
  // "host:port/name" of a TCPStore: where the members of the job `name` meet. Empty, with members:
  // there is none.
  std::string address{};
  int size = 1;  // how many found it
  // Fewer leave nobody out as absent. Python's steps() waits with fewer members; a loop of your own
  // decides that itself. By store_rule: how many decide. 0: size.
  int min_size = 0;
  int max_size = 65536;     // more wait as spares
  bool store_rule = false;  // the store decides, instead of a quorum of members
  // A member that is silent for so long is left out; likewise the heartbeat of managed groups that
  // have chosen none.
  std::chrono::milliseconds limit = std::chrono::seconds(5);
  // Of join(), and of recover() and agree() that name none.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // As GroupOptions; also of managed groups that have chosen none. Unset: the interface towards the
  // store.
  std::optional<std::string> interface = std::nullopt;
  std::optional<std::string> port_range = std::nullopt;
  // "host:port" of members, the same list everywhere: the job is founded and found there, and not
  // in the store. Each of these processes gives its own port, or "host:port", as `listen`.
  std::vector<std::string> members{};
  std::string listen{};  // empty: any port
  // With members: a text that all processes of the job know, and no others; it is never sent.
  // Unset: the value of TORCHFT_EXT_ELASTIC_KEY.
  std::optional<std::string> key = std::nullopt;
  // How long this member waits for others that live, as Python's steps(step_timeout=), where it
  // bounds three waits: an operation of a managed group (a shorter timeout of the group holds), an
  // agree() that names no timeout, and, in a recover() that names no patience, members that do not
  // call recover(): these are then left out, as by RecoverOptions::patience, after the job's
  // `limit` where a wait has timed out before. Not in the first recover(): founders load and
  // compile. Unset: only the timeouts of the job and of the groups bound these waits. (Python's Job
  // has no such option; its steps() takes four fifths of the job's timeout.)
  std::optional<std::chrono::milliseconds> step_timeout = std::nullopt;
};

struct RecoverOptions {
  std::chrono::milliseconds timeout{0};  // 0: the job's
  // Members that live, and whose program does not call recover(), are left out after this time,
  // where those that call it are more than half of the voters (half: in a view with a witness) and
  // min_size at least. Unset: by JoinOptions::step_timeout; where that is unset too, they are
  // waited for until the timeout.
  std::optional<std::chrono::milliseconds> patience = std::nullopt;
  // An operator's word, after a NoQuorum error: this member goes on alone, in another lineage.
  bool without_quorum = false;
};

// The members that go on together, from one change to the next.
struct View {
  uint64_t number = 0;  // from 1; also names the generation
  std::string lineage;  // of views; 16 bytes, in hexadecimal
  int rank = 0;         // this process's
  int size = 1;
  int old_size = 0;                  // of the view before
  std::vector<std::string> members;  // their ids, by rank
  std::vector<bool> continuing;      // by rank: was it in the view before?
  // In order: what was done, and for how long.
  std::vector<std::pair<std::string, std::chrono::nanoseconds>> phases;
  // The lowest rank that was in the view before: it has the state to go on from. 0 in the first.
  int source() const;
  // Everyone was: nobody need be brought up to date.
  bool allContinue() const;
};

// Hashes of a member's state, of 1 to 16 bytes each. agree() compares them, so each member learns
// in that step that another member's state differs. Empty parts are not compared.
struct Digest {
  std::string common{};    // of what all members have to hold alike
  uint32_t shard = 0;      // the number of the shard that of_shard is about
  std::string of_shard{};  // of what the members that hold this shard have to hold alike
};

// The same on all members.
struct Answer {
  bool ok = false;                 // all said so, and none was lost before
  std::vector<std::string> notes;  // by rank; empty of who did not vote
  std::vector<int> lost;           // ranks
  std::vector<int> leaving;        // ranks that go once this is over
  int waiting = 0;                 // newcomers that there is a place for
  bool new_witness = false;        // the store has been restarted: the next view appoints it
  bool diverged = false;           // not ok: the digests of members differ
  bool last = false;               // a member said so
  // recover() has something to do.
  bool changes() const { return !lost.empty() || !leaving.empty() || waiting > 0 || new_witness; }
};

class Job {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Founds the job with size - 1 others, or waits for a place in it. Blocks up to the timeout.
  static std::shared_ptr<Job> join(const JoinOptions& options);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // From the next view on the group's generations follow the views. All members manage groups of
  // the same names: recover() compares them. Python's default group has the name "default".
  // Interface, ports and heartbeat that the group has not chosen become the job's.
  void manage(const std::string& name, const ProcessGroupPtr& group);
  // Waits for the next view and forms all groups in it. Throws NoQuorum, LeftOut and NoProgress
  // ElasticErrors. NoProgress: nothing succeeded in views in a row of the same members, in three
  // where their operations or names of groups differ, otherwise for a minute, by causes other than
  // abort() and leave(); where newcomers have been in no agreement that was ok, they alone
  // throw it. After the second such view a pause comes before each further one.
  View recover(Milliseconds timeout = Milliseconds(0));  // 0: the job's
  View recover(const RecoverOptions& options);
  // Are all well? An ok that one member got holds in every later view. timeout: 0 for the job's.
  // digest: the answer is ok only if all common parts are equal, and for each shard all parts of
  // it. Otherwise it has `diverged`. Members that give empty parts are not compared. last: this
  // member says that the run is over if the answer is ok; all learn that one said so.
  //
  // A call that ran out of time throws a Timeout ElasticError; recover() then, and the next agree()
  // takes that call up: it returns the answer of the same agreement. One that has waited for
  // step_timeout first ends the view on all members, and returns the answer that the next view
  // holds, where that comes within the job's `limit`.
  Answer agree(bool ok, const std::string& note = {}, Milliseconds timeout = Milliseconds(0),
               const Digest& digest = {}, bool last = false);
  // So many steps have been committed, by the program's own count: for processes that ask how the
  // job is (`python -m torchft_ext.elastic status`), which hear the last count and how fast it
  // grew.
  void countSteps(uint64_t committed);
  // The members have gone on, or are about to: recover().
  bool isOver() const;
  // Fails the generations of all managed groups, so that no member waits for this one.
  void abort(const std::string& why);
  // From the next agree() on all know that this member goes; recover() returns no view from now on,
  // but by an operator's word: it throws LeftOut, or NoQuorum.
  void setLeaving();
  // Says that the job has ended well: Python's Job.end(). Call it on every member, after an agree()
  // that was ok and in which all meant that. Processes that come later get a JobOverError from
  // join(), and spares from recover(). False: it is not on record, since the job has no store, or
  // that does not answer in time. Processes that come to a listed member are told of the end until
  // that member leaves: where there is no store, let one stay a while before leave().
  bool end(Milliseconds timeout = std::chrono::seconds(2));
  // Shuts down the managed groups, says goodbye and ends this member's threads: Python's close().
  // Members that wait for this one in an operation are released at once. False: somebody may still
  // have needed it.
  bool leave(Milliseconds timeout = std::chrono::seconds(2));
  // Processes that ask for a place; a hint.
  std::vector<std::string> waiting() const;

 private:
  Job(std::shared_ptr<ElasticJob> job, const JoinOptions& options);
  const std::shared_ptr<ElasticJob> job_;
  const Milliseconds timeout_;
  const Milliseconds limit_;
  const std::optional<Milliseconds> step_timeout_;
  // Of the thread that calls agree() and recover().
  std::vector<std::string> members_;  // of the view that was formed last
  bool timed_out_ = false;            // an agreement of that view
};

// A group of this process alone, for Job::manage(): models can be built on it at once.
ProcessGroupPtr makeLocalGroup(const GroupOptions& options = {});

}  // namespace elastic
}  // namespace torchft_ext

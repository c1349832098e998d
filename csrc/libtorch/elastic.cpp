#include "torchft_ext/torch/elastic.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "c10d/group/elastic_job.h"
#include "c10d/group/ft_process_group.h"

namespace torchft_ext::elastic {
namespace {

std::string hexOf(const Lineage& lineage) {
  return lineage.hex();
}

View viewOf(const ElasticJob::Formed& formed, const MemberId& self) {
  const torchft_ext::View& found = formed.view;
  View view;
  view.number = found.number;
  view.lineage = hexOf(found.lineage);
  view.rank = found.rankOf(self);
  view.size = static_cast<int>(found.members.size());
  view.old_size = found.old_size;
  for (const Member& member : found.members) {
    view.members.push_back(member.id.hex());
    view.continuing.push_back(found.number > 1 && member.since < found.number);
  }
  for (const auto& [phase, took] : formed.phases) view.phases.emplace_back(phase, took);
  return view;
}

// Whoever waits in vain ends the wait on all members; the next view says what the answer is.
torchft_ext::Answer agreeInStep(ElasticJob& job, const Vote& vote, Job::Milliseconds timeout,
                                Job::Milliseconds for_next_view, bool& timed_out) {
  try {
    return job.agree(vote, timeout);
  } catch (const ElasticError& error) {
    if (error.kind() != ElasticErrorKind::kTimeout && error.kind() != ElasticErrorKind::kNoQuorum) {
      throw;
    }
    timed_out = true;
    job.abort(error.what());
    try {
      return job.agree(vote, for_next_view);
    } catch (const ElasticError&) {
      throw ElasticError(error);  // the first one says more
    }
  }
}

}  // namespace

int View::source() const {
  const auto first = std::find(continuing.begin(), continuing.end(), true);
  return first == continuing.end() ? 0 : static_cast<int>(first - continuing.begin());
}

bool View::allContinue() const {
  return std::all_of(continuing.begin(), continuing.end(), [](bool was) { return was; });
}

std::shared_ptr<Job> Job::join(const JoinOptions& options) {
  ElasticJobOptions chosen;
  chosen.address = options.address;
  chosen.size = options.size;
  chosen.min_size = options.min_size == 0 ? options.size : options.min_size;
  chosen.max_size = options.max_size;
  chosen.store_rule = options.store_rule;
  chosen.limit = options.limit;
  chosen.network.interface = options.interface;
  chosen.network.port_range = options.port_range;
  chosen.members = options.members;
  chosen.listen = options.listen;
  const char* const key = std::getenv("TORCHFT_EXT_ELASTIC_KEY");
  chosen.key = options.key.value_or(key == nullptr ? "" : key);
  TORCH_CHECK_VALUE(!options.step_timeout || options.step_timeout->count() > 0,
                    "elastic.join: step_timeout: expected a positive time, found ",
                    options.step_timeout.value_or(Milliseconds(0)).count(), " ms");
  return std::shared_ptr<Job>(new Job(ElasticJob::join(chosen, options.timeout), options));
}

Job::Job(std::shared_ptr<ElasticJob> job, const JoinOptions& options)
    : job_(std::move(job)),
      timeout_(options.timeout),
      limit_(options.limit),
      step_timeout_(options.step_timeout) {}
Job::~Job() = default;

void Job::manage(const std::string& name, const ProcessGroupPtr& group) {
  const auto* own = dynamic_cast<const FtProcessGroup*>(group.get());
  TORCH_CHECK_VALUE(own != nullptr,
                    "manage: group: expected one of makeLocalGroup() or makeGroup()");
  job_->manage(name, {own->backend()});
  if (step_timeout_ && own->backend()->getBackendOptions()->timeout > *step_timeout_) {
    own->backend()->setTimeout(*step_timeout_);
  }
}

View Job::recover(Milliseconds timeout) {
  return recover(RecoverOptions{.timeout = timeout});
}

View Job::recover(const RecoverOptions& options) {
  std::optional<Milliseconds> patience = options.patience;
  // Members may be late for the first view: they load and compile.
  if (!patience && step_timeout_ && !members_.empty()) {
    patience = timed_out_ || job_->hasTimedOut() ? limit_ : *step_timeout_;
  }
  const ElasticJob::Formed formed = job_->recover(
      options.timeout.count() == 0 ? timeout_ : options.timeout, patience, options.without_quorum);
  job_->logView(formed.phases);
  View view = viewOf(formed, job_->member().id());
  members_ = view.members;
  timed_out_ = false;
  return view;
}

Answer Job::agree(bool ok, const std::string& note, Milliseconds timeout, const Digest& digest,
                  bool last) {
  Vote vote;
  vote.ok = ok;
  vote.last = last;
  vote.note = note;
  vote.digest = {digest.common, digest.shard, digest.of_shard};
  const bool by_step = timeout.count() == 0 && step_timeout_;
  if (timeout.count() == 0) timeout = step_timeout_.value_or(timeout_);
  const torchft_ext::Answer found =
      by_step ? agreeInStep(*job_, vote, timeout, limit_, timed_out_) : job_->agree(vote, timeout);
  Answer answer;
  answer.ok = found.ok;
  answer.waiting = static_cast<int>(found.waiting.size());
  answer.new_witness = found.new_witness;
  answer.diverged = found.diverged;
  answer.last = found.last;
  std::map<std::string, std::string> notes;
  for (const auto& [id, said] : found.notes) notes[id.hex()] = said;
  std::set<std::string> leaving;
  for (const MemberId& id : found.leaving) leaving.insert(id.hex());
  for (const std::string& member : members_) {
    const auto rank = static_cast<int>(answer.notes.size());
    const auto said = notes.find(member);
    if (said == notes.end()) answer.lost.push_back(rank);
    if (leaving.contains(member)) answer.leaving.push_back(rank);
    answer.notes.push_back(said == notes.end() ? "" : said->second);
  }
  return answer;
}

void Job::countSteps(uint64_t committed) {
  job_->member().noteSteps(committed);
}

bool Job::isOver() const {
  return job_->member().isOver(job_->formedView());
}

void Job::abort(const std::string& why) {
  job_->abort(why);
}

void Job::setLeaving() {
  job_->setLeaving();
}

bool Job::end(Milliseconds timeout) {
  return job_->recordEnd(Deadline::after(timeout));
}

bool Job::leave(Milliseconds timeout) {
  return job_->leave(Deadline::after(timeout));
}

std::vector<std::string> Job::waiting() const {
  return job_->member().waiting();
}

ProcessGroupPtr makeLocalGroup(const GroupOptions& options) {
  return makeGroup(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
}

}  // namespace torchft_ext::elastic

#include "elastic/member_status.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <stdexcept>

#include "base/log.h"
#include "elastic/job_over.h"
#include "elastic/quorum.h"
#include "membership/records.h"
#include "torchft_ext/elastic_error.h"

namespace torchft_ext {
namespace {

std::string nameOfRecord(const std::string& bytes) {
  const auto record = decodeRecord(bytes);
  if (!record) return "an unknown process";
  return record->host + ", pid " + std::to_string(record->pid);
}

}  // namespace

const char* wordFor(Loss loss) {
  switch (loss) {
    case Loss::kDead:
      return "its process ended";
    case Loss::kFrozen:
      return "it does not answer";
    case Loss::kUnreachable:
      return "it cannot be reached";
    case Loss::kParted:
      return "it takes part in another lineage";
    case Loss::kLeftOut:
      return "it has been left out";
    case Loss::kAhead:
      return "it tells of a later view";
  }
  return "";
}

// ---- what is written

void MemberStatus::setSelf(const Member& self) {
  const MutexLock lock(mutex_);
  self_ = self;
}

void MemberStatus::setRules(const ElasticRules& rules) {
  const MutexLock lock(mutex_);
  rules_ = rules;
}

void MemberStatus::setLeaving() {
  const MutexLock lock(mutex_);
  leaving_ = true;
}

bool MemberStatus::leave() {
  const MutexLock lock(mutex_);
  changed_.notifyAll();
  return !std::exchange(left_, true);
}

void MemberStatus::begin(const ElasticCore& core) {
  const MutexLock lock(mutex_);
  for (const Member& member : core.view().members) {
    names_[member.id] = nameOfRecord(member.record);
  }
  view_before_ = std::exchange(view_, core.view());
  lost_before_ = core.lostBefore();
  noteChange();
  // At once: who awaits a view must not get one without this member.
  left_out_ = left_out_ || core.state() == ElasticCore::State::kLeftOut;
  missing_.clear();
  hopeless_ = false;
  store_trouble_.clear();
  changed_.notifyAll();
}

// Of view_, which has taken the place of view_before_.
void MemberStatus::noteChange() {
  Change change{{view_.number, static_cast<uint32_t>(view_.members.size()), {}, {}, {}, {}},
                Clock::now()};
  for (const Member& member : view_.members) {
    if (present_since_.emplace(member.id, change.at).second) {
      change.told.joined.push_back(nameOfLocked(member.id));
    }
  }
  for (const Member& member : view_before_.members) {
    if (!view_.has(member.id)) change.told.gone.push_back(nameOfGone(member.id));
  }
  for (auto one = present_since_.begin(); one != present_since_.end();) {
    one = view_.has(one->first) ? std::next(one) : present_since_.erase(one);
  }
  changes_.push_front(std::move(change));
  if (changes_.size() > kMostChanges) changes_.pop_back();
}

void MemberStatus::follow(const ElasticCore& core, const ElasticEffects& effects, bool hopeless) {
  const MutexLock lock(mutex_);
  for (const Outcome& outcome : effects.answers) {
    answers_[{outcome.view, outcome.index}] = outcome.answer;
  }
  left_out_ = left_out_ || effects.left_out;
  if (!effects.no_quorum.empty()) {
    missing_ = effects.no_quorum;
    hopeless_ = hopeless;
  }
  if (lost_ != core.losses()) lost_ = core.losses();
  std::erase_if(missing_, [&](const MemberId& id) { return !core.losses().contains(id); });
  unheard_ = core.unheard();
  if (std::vector<MemberId> ids = core.waiting(); ids != waiting_ids_) {
    waiting_ids_ = std::move(ids);
    waiting_.clear();
    for (const MemberId& id : waiting_ids_) waiting_.push_back(nameOfLocked(id));
  }
  if (!effects.answers.empty() || left_out_ || !missing_.empty()) changed_.notifyAll();
}

void MemberStatus::setOver(uint64_t view) {
  const MutexLock lock(mutex_);
  over_ = std::max(over_, view);
}

void MemberStatus::setContactsGone(const std::vector<Member>& members) {
  const MutexLock lock(mutex_);
  for (const Member& member : members) names_[member.id] = nameOfRecord(member.record);
  gone_contacts_ = idsOf(members);
  changed_.notifyAll();
}

void MemberStatus::setJobOver(const JobEnd& end) {
  const MutexLock lock(mutex_);
  job_end_ = end;
  changed_.notifyAll();
}

void MemberStatus::setHow(const std::map<MemberId, std::string>& lost) {
  const MutexLock lock(mutex_);
  how_ = lost;
}

void MemberStatus::noteSteps(uint64_t committed) {
  const MutexLock lock(mutex_);
  progress_.note(committed, Clock::now());
}

void MemberStatus::notePhases(uint64_t view,
                              const std::vector<std::pair<std::string, Duration>>& phases) {
  const MutexLock lock(mutex_);
  for (Change& change : changes_)
    if (change.told.view == view) change.told.phases = phases;
}

void MemberStatus::setStoreTrouble(std::string trouble) {
  const MutexLock lock(mutex_);
  store_trouble_ = std::move(trouble);
}

// ---- what is read

Member MemberStatus::self() const {
  const MutexLock lock(mutex_);
  return self_;
}

View MemberStatus::view() const {
  const MutexLock lock(mutex_);
  return view_;
}

ElasticRules MemberStatus::rules() const {
  const MutexLock lock(mutex_);
  return rules_;
}

std::vector<std::string> MemberStatus::waiting() const {
  const MutexLock lock(mutex_);
  return waiting_;
}

std::string MemberStatus::nameOf(const MemberId& id) const {
  const MutexLock lock(mutex_);
  return nameOfLocked(id);
}

std::vector<MemberId> MemberStatus::leftOutSince(const View& view) const {
  const MutexLock lock(mutex_);
  std::vector<MemberId> ids;
  for (const Member& member : view_before_.members) {
    if (!view.has(member.id)) ids.push_back(member.id);
  }
  return ids;
}

bool MemberStatus::isOver(uint64_t view) const {
  const MutexLock lock(mutex_);
  return over_ >= view || view_.number > view;
}

bool MemberStatus::isLeaving() const {
  const MutexLock lock(mutex_);
  return leaving_;
}

// An answer holds everybody's, and a message two answers and more.
void MemberStatus::checkNote(const std::string& note) const {
  constexpr size_t kAll = size_t{1} << 20U;
  const size_t members = view().members.size();
  const size_t most = std::min(kLongestNote, kAll / std::max<size_t>(members, 1));
  if (note.size() <= most) return;
  throw std::invalid_argument("agree: note: expected at most " + std::to_string(most) +
                              " bytes among " + std::to_string(members) + " members, found " +
                              std::to_string(note.size()));
}

std::string MemberStatus::nameOfLocked(const MemberId& id) const {
  const auto found = names_.find(id);
  const std::string name = found == names_.end() ? "a newcomer" : found->second;
  const std::string trouble = troubleOf(id);
  return trouble.empty() ? name : name + " (" + trouble + ")";
}

// A member of whom nothing else is known has not promised to the view's proposer, or has left.
std::string MemberStatus::nameOfGone(const MemberId& id) const {
  const std::string name = nameOfLocked(id);
  return troubleOf(id).empty() ? name + " (it left, or did not come to this view)" : name;
}

// Empty: nothing is known.
std::string MemberStatus::troubleOf(const MemberId& id) const {
  for (const auto* lost : {&lost_, &lost_before_}) {
    const auto gone = lost->find(id);
    if (gone == lost->end()) continue;
    const auto how = how_.find(id);  // of who is only suspected more is known than of who is dead
    const bool suspected = gone->second == Loss::kFrozen && how != how_.end();
    return suspected ? how->second : wordFor(gone->second);
  }
  return {};
}

void MemberStatus::describe(JobReport& report) const {
  const MutexLock lock(mutex_);
  const auto now = Clock::now();
  report.self = self_;
  report.lineage = view_.lineage;
  report.view = view_.number;
  report.witness = view_.witness;
  report.size = static_cast<uint32_t>(view_.members.size());
  const std::set<MemberId> voters(view_.voters.begin(), view_.voters.end());
  for (const Member& member : view_.members) {
    if (report.members.size() >= kMostReported) break;
    ReportedMember one{member, {}, voters.contains(member.id), false, troubleOf(member.id)};
    const auto since = present_since_.find(member.id);
    if (since != present_since_.end()) one.present = now - since->second;
    report.members.push_back(std::move(one));
  }
  for (const Change& change : changes_) {
    report.changes.push_back(change.told);
    report.changes.back().ago = now - change.at;
  }
  report.steps = progress_.at(now);
  if (awaits_answer_ && !unheard_.empty())
    report.waits.push_back("an agreement waits for the word of " + namesOf(unheard_));
}

std::string MemberStatus::namesOf(const std::vector<MemberId>& ids) const {
  std::string names;
  for (const MemberId& id : ids) names += (names.empty() ? "" : "; ") + nameOfLocked(id);
  return names;
}

// ---- what is awaited

View MemberStatus::awaitView(uint64_t newer_than, Deadline deadline, const Cancelled& cancelled,
                             bool without_quorum) {
  const MutexLock lock(mutex_);
  const auto over = [&]() NO_THREAD_SAFETY_ANALYSIS {
    return view_.number > newer_than || left_out_ || left_ || (hopeless_ && !without_quorum) ||
           !gone_contacts_.empty() || job_end_;
  };
  waitUntilDone(mutex_, changed_, over, deadline, cancelled);
  if (view_.number > newer_than && !left_out_ && !left_) return view_;
  throwNoView();
}

MemberStatus::Agreement MemberStatus::beginAgreement(uint64_t view) {
  const MutexLock lock(mutex_);
  if (awaits_answer_) {
    throw ElasticError(ElasticErrorKind::kState,
                       "elastic job '" + job_ + "': agree() in view " + std::to_string(view) +
                           " while another thread is in agree(): one thread at a time takes part");
  }
  awaits_answer_ = true;
  const bool fresh = !(agreeing_ && asked_.first == view);
  if (fresh) {
    asked_ = {view, asked_.first == view ? asked_.second + 1 : 1};
    agreeing_ = true;
  }
  return {asked_.first, asked_.second, fresh};
}

Answer MemberStatus::awaitAnswer(const Agreement& agreement, Deadline deadline,
                                 const Cancelled& cancelled) {
  constexpr Duration kLeastTold = std::chrono::seconds(1);  // shorter waits are no news
  const Key wanted{agreement.view, agreement.index};
  const Duration early = deadline.remaining() / 10;
  if (early >= kLeastTold && !deadline.isNever()) {
    const std::string awaited = awaitedAfter(early, wanted, cancelled);
    if (!awaited.empty()) {
      log(LogLevel::kWarning, "elastic job '" + job_ + "': agreement " +
                                  std::to_string(agreement.index) + " of view " +
                                  std::to_string(agreement.view) + " still waits for " + awaited);
    }
  }
  const MutexLock lock(mutex_);
  waitForAnswer(wanted, deadline, cancelled);
  awaits_answer_ = false;
  return takeAnswer(wanted);
}

// Whose word is missing then; empty: nobody's.
std::string MemberStatus::awaitedAfter(Duration early, const Key& wanted,
                                       const Cancelled& cancelled) {
  const MutexLock lock(mutex_);
  waitForAnswer(wanted, Deadline::after(early), cancelled);
  return isSettled(wanted) ? "" : namesOf(unheard_);
}

// The agreement has an answer, or this member will hear none.
bool MemberStatus::isSettled(const Key& wanted) const {
  return answers_.contains(wanted) || left_out_ || left_ || hopeless_;
}

void MemberStatus::waitForAnswer(const Key& wanted, Deadline deadline, const Cancelled& cancelled) {
  const auto over = [&]() NO_THREAD_SAFETY_ANALYSIS { return isSettled(wanted); };
  try {
    waitUntilDone(mutex_, changed_, over, deadline, cancelled);
  } catch (...) {
    awaits_answer_ = false;
    throw;
  }
}

Answer MemberStatus::takeAnswer(const Key& key) {
  const auto found = answers_.find(key);
  if (found == answers_.end()) throwNoAnswer(key.second);
  Answer answer = std::move(found->second);
  answers_.erase(found);
  agreeing_ = false;
  return answer;
}

void MemberStatus::throwNoAnswer(uint64_t index) const {
  const bool undecided = !missing_.empty() || lacksWitness();
  if (left_ || left_out_ || undecided || unheard_.empty()) throwNoView();
  throw ElasticError(ElasticErrorKind::kTimeout,
                     "elastic job '" + job_ + "': agreement " + std::to_string(index) +
                         " of view " + std::to_string(view_.number) +
                         ": no word by the deadline of " + namesOf(unheard_) +
                         "; the next call takes it up, or leave them out by recover()");
}

void MemberStatus::throwNoView() const {
  const std::string job = "elastic job '" + job_ + "': ";
  if (left_) {
    throw ElasticError(ElasticErrorKind::kState, job + "this member has left; join again");
  }
  if (left_out_) {
    const char* why = leaving_
                          ? " is without this member, which has said that it leaves: close the job"
                          : " is without this member, which was silent or cut off: join again";
    throw ElasticError(ElasticErrorKind::kLeftOut,
                       job + "view " + std::to_string(view_.number) + why);
  }
  if (job_end_) throw jobOver(job_, *job_end_);
  if (!gone_contacts_.empty()) throwContactsGone();
  if (!missing_.empty()) throwNoQuorum();
  if (lacksWitness()) throwWithoutWitness();
  throw ElasticError(ElasticErrorKind::kTimeout,
                     job + "no view newer than " + std::to_string(view_.number) +
                         " by the deadline; see whether its members still run" +
                         (unheard_.empty() ? "" : ", first " + namesOf(unheard_)) + storeTrouble() +
                         adviceToNewcomer());
}

// Of a process without a place: those whom it asks are the members of the last view that it found.
std::string MemberStatus::adviceToNewcomer() const {
  if (view_.number != 0 || unheard_.empty()) return "";
  size_t gone = 0;
  for (const MemberId& id : unheard_) {
    const auto loss = lost_.find(id);
    if (loss != lost_.end() && isFinal(loss->second)) ++gone;
  }
  if (2 * gone < unheard_.size()) return "";
  return ". Half of them or more have ended, so the job may have lost its quorum, and takes nobody "
         "in. Two ways out: let one of those that run go on alone, by "
         "recover(without_quorum=True); or start the job under another name, from a checkpoint";
}

std::string MemberStatus::storeTrouble() const {
  return store_trouble_.empty() ? "" : "; the store: " + store_trouble_;
}

const char* MemberStatus::adviceWithoutQuorum() const {
  for (const MemberId& id : missing_) {
    const auto loss = lost_.find(id);
    if (loss != lost_.end() && loss->second == Loss::kAhead) {
      return ". If that is true, the job goes on without this process: join again";
    }
  }
  return hopeless_ ? ". Two ways out: start the job anew from a checkpoint, under another name; or "
                     "go on alone from here by recover(without_quorum=True)"
                   : ". Wait longer for them; or start the job anew from a checkpoint, under "
                     "another name; or, once they have ended for certain, go on alone from here by "
                     "recover(without_quorum=True)";
}

// Half of the members are there, and the proposal still waits for the witness's answer.
bool MemberStatus::lacksWitness() const {
  if (view_.witness.isZero() || rules_.storeDecidesAfter(view_)) return false;
  std::set<MemberId> there;
  for (const Member& member : view_.members) {
    if (!lost_.contains(member.id)) there.insert(member.id);
  }
  return quorumOf(acceptorSets(view_, {}), there, /*has_witness=*/true) ==
         QuorumState::kWithWitness;
}

void MemberStatus::throwWithoutWitness() const {
  std::vector<MemberId> gone;
  for (const Member& member : view_.members) {
    if (lost_.contains(member.id)) gone.push_back(member.id);
  }
  throw ElasticError(ElasticErrorKind::kNoQuorum,
                     "elastic job '" + job_ + "': no quorum for the view after " +
                         std::to_string(view_.number) +
                         ": half of its members are there; missing " + namesOf(gone) +
                         "; and the job's store, the witness, did not answer" + storeTrouble() +
                         adviceWithoutQuorum());
}

void MemberStatus::throwContactsGone() const {
  throw ElasticError(
      ElasticErrorKind::kNoQuorum,
      "elastic job '" + job_ +
          "': it was founded before, and none of its members runs any more: missing " +
          namesOf(gone_contacts_) +
          ". It is not known to have ended well: too many were lost at once, or its store has "
          "forgotten the end. Two ways out: start the job under another name, from a checkpoint; "
          "or, where a member of it still runs and is only cut off, let that one go on by "
          "recover(without_quorum=True), and start this process again");
}

void MemberStatus::throwNoQuorum() const {
  std::string text = "elastic job '" + job_ + "': no quorum for the view after " +
                     std::to_string(view_.number) + ": missing " + namesOf(missing_);
  text += storeTrouble();
  throw ElasticError(ElasticErrorKind::kNoQuorum, text + adviceWithoutQuorum());
}

}  // namespace torchft_ext

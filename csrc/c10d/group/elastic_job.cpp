#include "c10d/group/elastic_job.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "base/hmac.h"
#include "base/log.h"
#include "base/text.h"
#include "c10d/adapter/arguments.h"
#include "c10d/group/environment.h"
#include "c10d/group/interface_choice.h"
#include "c10d/store/member_store.h"
#include "c10d/store/store_adapter.h"
#include "c10d/work/comm_error.h"
#include "comm/dump_files.h"
#include "comm/op_state.h"
#include "host/network_limits.h"

namespace torchft_ext {
namespace {

bool keepWaiting() {
  runWaitHook();
  return false;
}

constexpr const char* kWithoutStore = "without a store";  // in the place of a job's name

void checkWhereFound(const ElasticJobOptions& options, const char* operation) {
  TORCH_CHECK_VALUE(!options.address.empty() || !options.members.empty(), operation,
                    ": expected an address of a store, or members, found neither");
  TORCH_CHECK_VALUE(options.members.empty() || !options.key.empty(), operation,
                    ": key: expected one with members, found none");
}

void checkOptions(const ElasticJobOptions& options) {
  checkSize({"elastic.join", "size"}, options.size);
  TORCH_CHECK_VALUE(options.min_size >= 1 && options.min_size <= options.size,
                    "elastic.join: min_size: expected 1 to size (", options.size, "), found ",
                    options.min_size);
  TORCH_CHECK_VALUE(options.max_size >= options.size,
                    "elastic.join: max_size: expected at least size (", options.size, "), found ",
                    options.max_size);
  checkWhereFound(options, "elastic.join");
  TORCH_CHECK_VALUE(!options.store_rule || !options.address.empty(),
                    "elastic.join: rule: expected \"members\" for a job without a store");
  TORCH_CHECK_VALUE(options.limit.count() > 0,
                    "elastic.join: limit: expected a positive time, found ", options.limit.count(),
                    " ms");
}

StoreAddress storeNamedBy(const ElasticJobOptions& options) {
  return parseStoreAddress("elastic.join: address", options.address);
}

HostAndPort memberAt(const std::string& text) {
  return parseHostAndPort("elastic.join: members", text);
}

ListedAddresses listOf(const std::vector<std::string>& members) {
  std::vector<HostAndPort> listed;
  listed.reserve(members.size());
  for (const std::string& member : members) listed.push_back(memberAt(member));
  return [listed] {
    std::vector<SocketAddress> found;
    for (const HostAndPort& one : listed) {
      if (const auto address = resolveAddress(one.host, one.port)) found.push_back(*address);
    }
    return found;
  };
}

// Without a store, towards the listed members; this host's own name may stand for a loopback
// address, which is no help to others.
SocketAddress addressTowardsOthers(const ElasticJobOptions& options) {
  const Environment environment = readEnvironment();
  if (!options.address.empty()) {
    return chooseAddressTowards(options.network, environment, storeNamedBy(options));
  }
  std::optional<SocketAddress> first;
  for (const std::string& member : options.members) {
    const SocketAddress found =
        chooseAddressTowards(options.network, environment, memberAt(member));
    if (!found.isLoopback()) return found;
    if (!first) first = found;
  }
  return *first;
}

void chooseWhereToListen(const ElasticJobOptions& options, ElasticOptions& chosen) {
  chosen.bind_address = addressTowardsOthers(options);
  if (options.network.port_range) {
    chosen.ports = parsePortRange("elastic.join: port_range", *options.network.port_range);
  } else if (const auto ports = readEnvironment().ports) {
    chosen.ports = *ports;
  }
  if (options.listen.empty()) return;
  constexpr const char* kArgument = "elastic.join: listen";
  if (options.listen.find(':') == std::string::npos) {
    const uint16_t port = parsePort(kArgument, options.listen);
    chosen.ports = {port, port};
    return;
  }
  const HostAndPort wanted = parseHostAndPort(kArgument, options.listen);
  chosen.ports = {wanted.port, wanted.port};
  const auto address = resolveAddress(wanted.host, wanted.port);
  TORCH_CHECK_VALUE(address, "elastic.join: listen: expected an address of this host, found '",
                    options.listen, "', which does not resolve");
  chosen.bind_address = *address;
}

ElasticJob::Milliseconds ceilOf(Duration duration) {
  using Milliseconds = ElasticJob::Milliseconds;
  return std::max(std::chrono::ceil<Milliseconds>(std::min<Duration>(duration, kCentury)),
                  Milliseconds(1));
}

// Who of the view could not connect to whom, as far as the failure tells.
std::set<MemberPair> pairsCutBy(const Failure& failure, const View& view) {
  if (failure.kind != FailureKind::kConnectionLost) return {};
  const auto one = static_cast<size_t>(failure.cause.rank);
  const auto other = static_cast<size_t>(failure.cause.other_rank);
  if (failure.cause.rank < 0 || failure.cause.other_rank < 0 || one == other ||
      std::max(one, other) >= view.members.size()) {
    return {};
  }
  return {std::minmax(view.members[one].id, view.members[other].id)};
}

std::string decidersOf(const View& view, const ElasticMember& member) {
  if (view.decided_by.empty()) return "; of the founding";
  std::string names = "; decided by " + std::to_string(view.decided_by.size());
  if (view.store_decided) names += " and the store";
  for (size_t i = 0; i < view.decided_by.size(); ++i) {
    names += (i == 0 ? ": " : " + ") + member.nameOf(view.decided_by[i]);
  }
  return names;
}

FailurePtr overBefore() {
  Failure failure;
  failure.kind = FailureKind::kAborted;
  failure.cause.how = kAnotherView;
  failure.op = "recover";
  return std::make_shared<const Failure>(std::move(failure));
}

std::optional<Setback> setbackOf(const Failure& failure, bool view_over) {
  return torchft_ext::setbackOf(failure.kind, failure.cause.how, failure.describe(), view_over);
}

std::optional<Setback> setbackOfForming(const Failure& failure, bool view_over) {
  return torchft_ext::setbackOfForming(failure.kind, failure.cause.how, failure.describe(),
                                       view_over);
}

// "the managed groups 'default', 'other'", or so many as fit into a member's record, and a number
// that differs where the rest does.
std::string purposeOf(const std::vector<std::string>& names) {
  constexpr size_t kLongest = 200;
  std::string text = names.size() == 1 ? "the managed group " : "the managed groups ";
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "'" : ", '") + names[i] + "'";
  }
  if (text.size() <= kLongest) return text;
  const Digest256 digest = hmacSha256("", text);
  const std::string rest = std::to_string(digest[0] << 16U | digest[1] << 8U | digest[2]);
  return cutText(text, kLongest) + "... (" + std::to_string(names.size()) + ", #" + rest + ")";
}

std::string nameOfBackend(const std::string& group, size_t number) {
  return number == 0 ? group : group + "/" + std::to_string(number);
}

}  // namespace

std::shared_ptr<ElasticJob> ElasticJob::join(const ElasticJobOptions& options, Milliseconds timeout,
                                             std::shared_ptr<std::atomic<bool>> leaving) {
  checkOptions(options);
  TORCH_CHECK_VALUE(timeout.count() > 0, "elastic.join: timeout: expected a positive time, found ",
                    timeout.count(), " ms");
  const Deadline deadline = Deadline::after(timeout);
  std::shared_ptr<ElasticJob> job(new ElasticJob());
  ElasticOptions chosen;
  chosen.job = kWithoutStore;
  chosen.size = options.size;
  chosen.rules = {options.store_rule, options.min_size, options.max_size, {}};
  chooseWhereToListen(options, chosen);
  job->interface_name_ = interfaceOf(chosen.bind_address);
  chosen.limit = options.limit;
  {
    const MutexLock lock(job->mutex_);
    job->standstill_ = Standstill(options.limit);
  }
  // Where the members listen: a group made over another store would look for its own address.
  job->network_.interface = options.network.interface.value_or(chosen.bind_address.ip());
  job->network_.port_range = options.network.port_range;
  job->network_.heartbeat =
      std::clamp<Milliseconds>(options.limit, kShortestHeartbeat, kLongestHeartbeat);
  if (!options.address.empty()) {
    const StoreAddress address = storeNamedBy(options);
    chosen.job = address.prefix;
    chosen.store = clientsOf(address);
    chosen.prefix = address.prefix + "/";
  }
  if (!options.members.empty()) chosen.listed = listOf(options.members);
  chosen.key = options.key;
  chosen.backoff = options.backoff;
  job->name_ = chosen.job;
  chosen.on_stopped = [weak = std::weak_ptr<ElasticJob>(job)](uint64_t view,
                                                              const std::string& why) {
    if (const auto alive = weak.lock()) alive->onStopped(view, why);
  };
  chosen.waits = waitsOfProcess;
  const auto told_to_leave = [leaving = std::move(leaving)] {
    runWaitHook();
    return leaving && leaving->load();
  };
  job->member_ = ElasticMember::join(std::move(chosen), deadline, told_to_leave);
  return job;
}

JobState ElasticJob::inquire(const ElasticJobOptions& options, Milliseconds timeout) {
  checkWhereFound(options, "elastic status");
  TORCH_CHECK_VALUE(timeout.count() > 0,
                    "elastic status: timeout: expected a positive time, found ", timeout.count(),
                    " ms");
  InquiryOptions chosen;
  chosen.job = kWithoutStore;
  chosen.key = options.key;
  if (!options.address.empty()) {
    const StoreAddress address = storeNamedBy(options);
    chosen.job = address.prefix;
    chosen.store = clientsOf(address);
    chosen.prefix = address.prefix + "/";
  }
  if (!options.members.empty()) chosen.listed = listOf(options.members);
  return JobInquiry(std::move(chosen)).ask(Deadline::after(timeout), keepWaiting);
}

ElasticJob::~ElasticJob() = default;

void ElasticJob::requireFree(const std::string& name, size_t backends) const {
  for (size_t i = 0; i < backends; ++i) {
    const std::string own = nameOfBackend(name, i);
    const bool taken = std::any_of(managed_.begin(), managed_.end(),
                                   [&](const Managed& one) { return one.name == own; });
    TORCH_CHECK(!taken, "elastic: manage: expected a name that no group has yet, found '", own,
                "'");
  }
}

// To adopt looks addresses up and starts threads: without the lock, which the view's end takes.
void ElasticJob::manage(const std::string& name, const std::vector<BackendPtr>& backends) {
  {
    const MutexLock lock(mutex_);
    requireFree(name, backends.size());
  }
  for (const BackendPtr& backend : backends) adopt(backend);
  const MutexLock lock(mutex_);
  requireFree(name, backends.size());  // another thread may have come first
  for (size_t i = 0; i < backends.size(); ++i) {
    managed_.push_back({nameOfBackend(name, i), backends[i], 0});
  }
}

void ElasticJob::adopt(const BackendPtr& backend) const {
  backend->followNetwork(network_);
  backend->group().setJob(JobMembership::following(successes_));
}

// By name: newcomers may have come to manage them in another order.
std::vector<ElasticJob::Managed> ElasticJob::managed() const {
  std::vector<Managed> all;
  {
    const MutexLock lock(mutex_);
    all = managed_;
  }
  std::sort(all.begin(), all.end(),
            [](const Managed& a, const Managed& b) { return a.name < b.name; });
  return all;
}

uint64_t ElasticJob::formedView() const {
  const MutexLock lock(mutex_);
  return formed_.number;
}

c10::intrusive_ptr<c10d::Store> ElasticJob::storeOf(uint64_t view) const {
  return c10::make_intrusive<MemberStore>(member_, view);
}

void ElasticJob::setSoleHolders(const std::vector<int>& ranks, Milliseconds patience) {
  if (patience <= Milliseconds(0)) {
    throw std::invalid_argument("await_frozen: patience: expected a positive time, found " +
                                std::to_string(patience.count()) + " ms");
  }
  std::set<MemberId> ids;
  {
    const MutexLock lock(mutex_);
    for (const int rank : ranks) {
      if (rank < 0 || static_cast<size_t>(rank) >= formed_.members.size()) {
        throw std::invalid_argument("await_frozen: ranks: expected some of a view of " +
                                    std::to_string(formed_.members.size()) + ", found " +
                                    std::to_string(rank));
      }
      ids.insert(formed_.members[static_cast<size_t>(rank)].id);
    }
  }
  member_->setSoleHolders(ids, durationOf(patience));
}

// Who a failed generation says has died or frozen need not be waited for.
void ElasticJob::suspectCulprits() {
  View formed;
  {
    const MutexLock lock(mutex_);
    formed = formed_;
  }
  std::map<MemberId, std::string> culprits;
  for (const Managed& one : managed()) {
    const FailurePtr failure = one.backend->errored();
    if (!failure || failure->kind != FailureKind::kPeerLost) continue;
    if (one.generation != one.backend->generation()) continue;
    const auto rank = static_cast<size_t>(failure->cause.rank);
    if (failure->cause.rank >= 0 && rank < formed.members.size()) {
      culprits[formed.members[rank].id] = failure->cause.how;
    }
  }
  if (!culprits.empty()) member_->suspect(culprits);
}

// How the generation that is over came to its end: of the group that failed first.
ElasticJob::Phases ElasticJob::phasesOfLoss() const {
  FailurePtr first;
  for (const Managed& one : managed()) {
    const FailurePtr failure = one.backend->errored();
    if (!failure || one.generation == 0 || failure->generation != one.generation) continue;
    if (!first || failure->at < first->at) first = failure;
  }
  if (!first) return {};
  Phases phases;
  if (first->silent_for > Duration::zero()) phases.emplace_back("detect", first->silent_for);
  phases.emplace_back("release", Clock::now() - first->at);
  return phases;
}

ElasticJob::Formed ElasticJob::recover(Milliseconds timeout, std::optional<Milliseconds> patience,
                                       bool without_quorum) {
  const Deadline deadline = Deadline::after(timeout);
  const auto lost = phasesOfLoss();
  suspectCulprits();
  judgeLastView();
  const auto working = [this](const void*) { member_->setReady(false); };
  const std::unique_ptr<const void, decltype(working)> back_to_work(this, working);
  Formed formed = recoverBy(
      deadline, patience ? std::optional(durationOf(*patience)) : std::nullopt, without_quorum);
  formed.phases.insert(formed.phases.begin(), lost.begin(), lost.end());
  std::string left_out;  // now: the members may decide on another view before this one is logged
  for (const MemberId& id : member_->leftOutSince(formed.view)) {
    left_out += "; without " + member_->nameOf(id);
  }
  const MutexLock lock(mutex_);
  left_out_ = std::move(left_out);
  return formed;
}

ElasticJob::Formed ElasticJob::recoverBy(Deadline deadline, std::optional<Duration> patience,
                                         bool alone) {
  Formed result;
  std::set<MemberId> absent;
  std::set<MemberPair> unreachable;
  Duration agreeing{0};
  Duration connecting{0};
  for (;;) {
    const auto began = Clock::now();
    if (!alone) requireProgress(deadline);
    uint64_t newer_than = 0;
    {
      const MutexLock lock(mutex_);
      newer_than = tried_;
    }
    result.view = std::exchange(alone, false)
                      ? member_->goOnAlone(deadline, keepWaiting)
                      : awaitView(newer_than, deadline, unreachable, absent);
    const auto decided = Clock::now();
    agreeing += decided - began;
    const Deadline limit = patience ? deadline.orEarlier(*patience) : deadline;
    const FailurePtr failure = formAll(result.view, result.view.rankOf(member_->id()), limit);
    connecting += Clock::now() - decided;
    if (!failure) break;
    if (isEarlyLeaver()) throwLeftEarly();
    judge(result.view, setbackOfForming(*failure, member_->isOver(result.view.number)),
          Duration::zero());
    // What an attempt of the last milliseconds would say is no help.
    if (deadline.remaining() < milliseconds(50)) throwFailure(failure);
    absent.clear();
    unreachable = pairsCutBy(*failure, result.view);
    if (!patience || failure->kind != FailureKind::kTimeout) continue;  // one tells the others
    *patience *= 2;  // what takes longer must not be cut short again and again
    for (const Member& member : result.view.members) {
      if (member.id != member_->id()) absent.insert(member.id);
    }
  }
  noteFormed(result.view.number);
  result.phases = {{"agree", agreeing}, {"connect", connecting}};
  return result;
}

// Another view of the same members mends nothing where the program itself is wrong.
void ElasticJob::judgeLastView() {
  View formed;
  Duration stood{0};
  {
    const MutexLock lock(mutex_);
    if (judged_ == formed_.number) return;
    judged_ = formed_.number;
    formed = formed_;
    stood = Clock::now() - formed_at_;
  }
  judge(formed, setbackOfLastView(formed), stood);
}

std::optional<Setback> ElasticJob::setbackOfLastView(const View& view) const {
  {
    const MutexLock lock(mutex_);
    if (came_to_nothing_) return came_to_nothing_;
  }
  const bool over = member_->isOver(view.number);
  std::optional<Setback> found;
  for (const Managed& one : managed()) {
    if (one.generation == 0 || one.generation != one.backend->generation()) continue;
    const FailurePtr failure = one.backend->errored();
    if (!failure) continue;
    auto setback = setbackOf(*failure, over);
    if (setback && (!found || setback->is_disagreement)) found = std::move(setback);
  }
  return found;
}

void ElasticJob::judge(const View& view, std::optional<Setback> setback, Duration stood) {
  // After a mismatch the sender's operation may have succeeded although its receivers refused it.
  constexpr uint64_t kMostFaked = 2;
  const uint64_t faked = setback && setback->is_disagreement ? kMostFaked : 0;
  const MutexLock lock(mutex_);
  const uint64_t succeeded = successes_->load(std::memory_order_relaxed) - succeeded_before_;
  if (succeeded > faked || stood >= Standstill::kLeastTime) {
    standstill_.clear();
  } else if (setback) {
    standstill_.add(view, *std::move(setback), Clock::now());
  }
}

// The pause comes before the error too: a member that ends by it would otherwise be lost before the
// others have heard the cause.
void ElasticJob::requireProgress(Deadline deadline) {
  pauseBefore(deadline);
  std::optional<std::string> verdict;
  {
    const MutexLock lock(mutex_);
    if (leaves_) return;
    verdict = standstill_.takeVerdict(member_->id());
  }
  if (verdict) throw ElasticError(ElasticErrorKind::kNoProgress, "recover: " + *verdict);
}

void ElasticJob::pauseBefore(Deadline deadline) {
  member_->setReady(true);  // nobody need leave it out
  const MutexLock lock(mutex_);
  const Duration pause = standstill_.pause(deadline.remaining());
  if (pause == Duration::zero()) return;
  const auto woken = [this, before = aborts_]()
                         NO_THREAD_SAFETY_ANALYSIS { return leaves_ || aborts_ != before; };
  waitUntilDone(mutex_, woken_, woken, Deadline::after(pause), keepWaiting);
}

void ElasticJob::cameToNothing(FailureKind kind, const std::string& how,
                               const std::string& description) {
  const bool over = member_->isOver(formedView());
  const MutexLock lock(mutex_);
  came_to_nothing_ = torchft_ext::setbackOfForming(kind, how, description, over);
}

bool ElasticJob::isEarlyLeaver() const {
  const MutexLock lock(mutex_);
  return leaves_ && formed_.number == 0;
}

void ElasticJob::throwLeftEarly() {
  throw ElasticError(ElasticErrorKind::kLeftOut,
                     "recover: this process was told to leave before it had a part in a view: "
                     "close the job");
}

View ElasticJob::awaitView(uint64_t newer_than, Deadline deadline,
                           const std::set<MemberPair>& unreachable,
                           const std::set<MemberId>& absent) {
  const auto leaves_early = [this] {
    runWaitHook();
    return isEarlyLeaver();
  };
  if (leaves_early()) throwLeftEarly();
  try {
    return member_->awaitView(newer_than, deadline, leaves_early, unreachable, absent);
  } catch (const ElasticError&) {
    if (isEarlyLeaver()) throwLeftEarly();
    throw;
  }
}

// A handler may call it on the very thread that forms a view: so nothing is waited for here.
void ElasticJob::setLeaving() {
  std::vector<Managed> forming;
  {
    const MutexLock lock(mutex_);
    leaves_ = true;
    woken_.notifyAll();
    if (forming_ != 0 && formed_.number == 0) forming = managed_;
  }
  member_->setLeaving();
  for (const Managed& one : forming) {
    one.backend->group().beginAbort("this process was told to leave");
  }
}

bool ElasticJob::recordEnd(Deadline deadline) {
  return member_->recordEnd(deadline, keepWaiting);
}

bool ElasticJob::leave(Deadline deadline) {
  if (forks_ != forkCount()) return true;
  setLeaving();  // members that are released by what follows decide without it
  const Deadline of_groups = deadline.orEarlier(deadline.remaining() / 4);
  for (const Managed& one : managed()) one.backend->group().shutdown(of_groups);
  return member_->leave(deadline);
}

bool ElasticJob::hasTimedOut() const {
  const std::vector<Managed> groups = managed();
  return std::any_of(groups.begin(), groups.end(), [](const Managed& one) {
    const FailurePtr failure = one.backend->errored();
    return failure && one.generation != 0 && failure->generation == one.generation &&
           failure->kind == FailureKind::kTimeout;
  });
}

FailurePtr ElasticJob::formAll(const View& view, int rank, Deadline deadline) {
  {
    const MutexLock lock(mutex_);
    forming_ = tried_ = view.number;
    succeeded_before_ = successes_->load(std::memory_order_relaxed);
  }
  member_->watchForming(true);
  const auto ended = [this](const void*) {
    member_->watchForming(false);
    const MutexLock lock(mutex_);
    forming_ = 0;
  };
  const std::unique_ptr<const void, decltype(ended)> forming(this, ended);
  if (member_->isOver(view.number)) return overBefore();
  const auto size = static_cast<int>(view.members.size());
  FailurePtr failure;
  std::map<std::string, int64_t> generations;
  const std::vector<Managed> groups = managed();
  std::vector<std::string> names;
  names.reserve(groups.size());
  for (const Managed& one : groups) names.push_back(one.name);
  const std::string purpose = purposeOf(names);
  for (const Managed& one : groups) {
    // By number, so that members whose names differ meet, and find that out.
    const auto store = c10::make_intrusive<c10d::PrefixStore>(
        "managed/" + std::to_string(generations.size()), storeOf(view.number));
    const StorePlace place = storePlaceOf(store);
    failure = one.backend->tryForm({place.thread, place.prefix, purpose}, rank, size,
                                   ceilOf(deadline.remaining()));
    if (failure) break;
    generations[one.name] = one.backend->generation();
  }
  if (failure) return failure;
  const MutexLock lock(mutex_);
  formed_ = view;
  formed_at_ = Clock::now();
  came_to_nothing_.reset();
  for (Managed& one : managed_) one.generation = generations[one.name];
  return nullptr;
}

void ElasticJob::logView(const Phases& phases) const {
  View view;
  std::string left_out;
  {
    const MutexLock lock(mutex_);
    view = formed_;
    left_out = left_out_;
  }
  member_->notePhases(view.number, phases);
  std::string line = "view " + std::to_string(view.number) + ": " +
                     std::to_string(view.members.size()) + " members (" +
                     std::to_string(view.old_size) + " before), this one is rank " +
                     std::to_string(view.rankOf(member_->id()));
  line += left_out;
  line += decidersOf(view, *member_);
  for (const auto& [phase, duration] : phases) {
    line += "; " + phase + " " + formatSeconds(duration);
  }
  logLine(line);
}

void ElasticJob::logLine(const std::string& line) const {
  log(LogLevel::kInfo, "elastic job '" + name_ + "': " + line);
}

// The members may have gone on while the groups formed.
void ElasticJob::noteFormed(uint64_t view) {
  if (member_->isOver(view)) onStopped(view, kAnotherView);
}

Answer ElasticJob::agree(Vote vote, Milliseconds timeout) {
  const uint64_t view = formedView();
  Answer answer = member_->agree(view, std::move(vote), Deadline::after(timeout), keepWaiting);
  if (answer.ok) {
    const MutexLock lock(mutex_);
    standstill_.agreed(view);
    judged_ = view;  // whatever fails in it later
  }
  return answer;
}

void ElasticJob::abort(const std::string& why) {
  {
    const MutexLock lock(mutex_);
    ++aborts_;
    woken_.notifyAll();
  }
  const std::vector<Managed> groups = managed();
  for (const Managed& one : groups) one.backend->group().beginAbort(why);
  for (const Managed& one : groups) one.backend->abort(why);
  if (const uint64_t view = formedView(); view > 0) member_->endView(view);
}

void ElasticJob::onStopped(uint64_t view, const std::string& why) {
  std::vector<Managed> groups;
  bool forming = false;
  {
    const MutexLock lock(mutex_);
    forming = forming_ != 0 && forming_ <= view;
    if (!forming && (formed_.number == 0 || formed_.number > view)) return;
    groups = managed_;
  }
  // All at once: no group's waiters wait for another group's engine.
  for (const Managed& one : groups) {
    if (forming) {
      one.backend->group().beginAbort(why);
    } else {
      one.backend->group().beginAbortGeneration(one.generation, why);
    }
  }
  for (const Managed& one : groups) {
    if (forming) {
      one.backend->group().abort(why);
    } else {
      one.backend->group().abortGeneration(one.generation, why);
    }
  }
}

}  // namespace torchft_ext

#include "elastic/job_inquiry.h"

#include <algorithm>
#include <utility>

#include "base/mutex.h"
#include "elastic/job_store_thread.h"
#include "elastic/meeting_links.h"
#include "membership/records.h"
#include "net/event_loop.h"
#include "torchft_ext/elastic_error.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kNextContactAfter{250};  // one that lives answers in a few milliseconds
constexpr size_t kMostAsked = 64;               // for a report
constexpr size_t kMostProbed = 256;
constexpr std::chrono::seconds kReportWithin{3};  // after the last one was asked
constexpr std::chrono::seconds kStoreWithin{5};
constexpr std::chrono::seconds kProbeWithin{1};  // for a connection, and again for the answer
constexpr std::chrono::seconds kStopWithin{1};

// Where a process listens for others: its TCP port. Nothing: the record makes no sense.
std::optional<SocketAddress> portOf(const MemberRecord& record) {
  for (const SocketAddress& address : record.addresses) {
    if (!address.isLocal()) return address;
  }
  return std::nullopt;
}

// Those of a late view, then the founders, each once.
std::vector<Member> contactsOf(const MeetingState& meeting) {
  std::vector<Member> all = meeting.contacts;
  for (const Member& founder : meeting.founding->view.members) {
    const bool known = std::any_of(all.begin(), all.end(),
                                   [&](const Member& one) { return one.id == founder.id; });
    if (!known) all.push_back(founder);
  }
  if (all.size() > kMostAsked) all.resize(kMostAsked);
  return all;
}

MeetingState readMeeting(JobStore& store) {
  MeetingState found;
  found.founding = store.founding();
  if (found.founding) {
    found.contacts = store.contacts();
  } else {
    found.come = store.seatsTaken();
  }
  return found;
}

// A member's word counts for more than that of one left out, and a later view for more.
bool isBetter(const JobReport& report, const std::optional<JobReport>& than) {
  if (!than) return true;
  return std::pair(report.by, report.view) > std::pair(than->by, than->view);
}

}  // namespace

// Shared with what runs on the loop.
struct JobInquiry::Course : std::enable_shared_from_this<JobInquiry::Course> {
  struct Asked {
    Member member;
    std::string why_not;  // empty: nothing is known
    bool over = false;    // it has reported, or its connection has ended
    bool reported = false;
  };

  explicit Course(InquiryOptions given)
      : options(std::move(given)),
        loop("ft-inquiry"),
        links(std::make_shared<MeetingLinks>(loop, MeetingKey{options.job, options.key})),
        store(makeStore()) {}

  std::unique_ptr<JobStoreThread> makeStore() {
    ComparingStoreFactory factory = options.store;
    if (options.listed) {
      factory = [this] { return std::make_unique<ListedStore>(loop, links, options.listed); };
    }
    const std::string prefix = options.listed ? std::string() : options.prefix;
    return std::make_unique<JobStoreThread>(options.job, factory, prefix, /*may_witness=*/false);
  }

  // ---- the asking thread
  MeetingState findMeeting(Deadline deadline, const Cancelled& cancelled);
  void askMembers(const MeetingState& meeting, Deadline deadline, const Cancelled& cancelled);
  void probeMembers(Deadline deadline, const Cancelled& cancelled);
  void readRegister(MeetingState& meeting, Deadline deadline, const Cancelled& cancelled);
  void collect(JobState& state);
  void stop();
  // ---- the loop
  void open(size_t number, const SocketAddress& address);
  void onReport(size_t number, const std::string& payload);
  void onEnd(size_t number, const std::string& why);
  void probe(const Member& member);

  bool hasReport() REQUIRES(mutex) { return report && report->by == ReportedBy::kMember; }
  bool allOver() REQUIRES(mutex) {
    return std::all_of(asked.begin(), asked.end(), [](const Asked& one) { return one.over; });
  }

  const InquiryOptions options;
  EventLoop loop;
  std::shared_ptr<MeetingLinks> links;  // loop: to listed members
  std::unique_ptr<JobStoreThread> store;
  std::shared_ptr<Course> keep_alive;  // where the loop does not end
  // Loop.
  std::unique_ptr<MeetingLinks> members;
  std::map<MemberId, std::unique_ptr<Probe>> probes;
  Mutex mutex;
  CondVar changed;
  std::vector<Asked> asked GUARDED_BY(mutex);
  std::optional<JobReport> report GUARDED_BY(mutex);
  std::map<MemberId, ProbeAnswer> heard GUARDED_BY(mutex);
};

JobInquiry::JobInquiry(InquiryOptions options)
    : course_(std::make_shared<Course>(std::move(options))) {}

JobInquiry::~JobInquiry() {
  course_->stop();
}

JobState JobInquiry::ask(Deadline deadline, const Cancelled& cancelled) {
  JobState state;
  state.meeting = course_->findMeeting(deadline, cancelled);
  if (!state.meeting.founding) return state;
  course_->askMembers(state.meeting, deadline, cancelled);
  course_->probeMembers(deadline, cancelled);
  course_->collect(state);
  if (state.report) course_->readRegister(state.meeting, deadline, cancelled);
  return state;
}

// ---- the asking thread

MeetingState JobInquiry::Course::findMeeting(Deadline deadline, const Cancelled& cancelled) {
  const auto look = [](JobStore& job) {
    try {
      return readMeeting(job);
    } catch (const StoreError& error) {
      MeetingState failed;
      failed.trouble = error.what();
      return failed;
    }
  };
  try {
    return store->call(look, deadline.orEarlier(kStoreWithin), cancelled);
  } catch (const ElasticError&) {
    MeetingState failed;
    failed.trouble = "it does not answer";
    return failed;
  }
}

void JobInquiry::Course::askMembers(const MeetingState& meeting, Deadline deadline,
                                    const Cancelled& cancelled) {
  loop.post([self = shared_from_this(), key = inquiryKey(meeting.founding->key)] {
    self->members = std::make_unique<MeetingLinks>(self->loop, key);
  });
  const MutexLock lock(mutex);
  const auto done = [this]() NO_THREAD_SAFETY_ANALYSIS { return hasReport() || allOver(); };
  for (const Member& contact : contactsOf(meeting)) {
    const auto record = decodeRecord(contact.record);
    const auto address = record ? portOf(*record) : std::nullopt;
    if (!address) continue;
    const size_t number = asked.size();
    asked.push_back({contact, {}, false, false});
    loop.post([self = shared_from_this(), number, where = *address] { self->open(number, where); });
    waitUntilDone(mutex, changed, done, deadline.orEarlier(kNextContactAfter), cancelled);
    if (hasReport() || deadline.expired()) return;
  }
  waitUntilDone(mutex, changed, done, deadline.orEarlier(kReportWithin), cancelled);
}

void JobInquiry::Course::probeMembers(Deadline deadline, const Cancelled& cancelled) {
  const MutexLock lock(mutex);
  if (!report) return;
  size_t expected = 0;
  for (const ReportedMember& one : report->members) {
    if (one.member.id == report->self.id || expected >= kMostProbed) continue;
    ++expected;
    loop.post([self = shared_from_this(), member = one.member] { self->probe(member); });
  }
  const auto done = [this, expected]()
                        NO_THREAD_SAFETY_ANALYSIS { return heard.size() >= expected; };
  waitUntilDone(mutex, changed, done, deadline.orEarlier(2 * kProbeWithin), cancelled);
}

void JobInquiry::Course::collect(JobState& state) {
  const MutexLock lock(mutex);
  state.report = report;
  state.heard = heard;
  for (const Asked& one : asked) {
    if (one.reported) continue;
    state.silent.emplace_back(one.member, one.why_not.empty() ? "it did not answer" : one.why_not);
  }
}

// Of a job that is found by listed members the place is no store.
void JobInquiry::Course::readRegister(MeetingState& meeting, Deadline deadline,
                                      const Cancelled& cancelled) {
  if (options.listed) return;
  Lineage lineage;
  {
    const MutexLock lock(mutex);
    lineage = report->lineage;
  }
  const auto read = [lineage](JobStore& job) -> std::optional<JobStore::RegisterState> {
    try {
      return job.registerState(lineage);
    } catch (const StoreError&) {
      return std::nullopt;
    }
  };
  try {
    meeting.register_now = store->call(read, deadline.orEarlier(kStoreWithin), cancelled);
  } catch (const ElasticError&) {
    meeting.trouble = "it does not answer any more";
  }
}

void JobInquiry::Course::stop() {
  loop.runOnLoop(
      [self = shared_from_this()] {
        self->probes.clear();
        self->members.reset();
        self->links->finish();
      },
      Deadline::after(kStopWithin));
  // What runs late works with all of this.
  const bool loop_ended = loop.stop(Deadline::after(kStopWithin));
  const bool store_ended = store->stop(Deadline::after(kStopWithin));
  if (!loop_ended || (!store_ended && options.listed)) keep_alive = shared_from_this();
}

// ---- the loop

void JobInquiry::Course::open(size_t number, const SocketAddress& address) {
  MeetingLinks::Events events;
  events.on_met = [this, number](const Standing&) { members->inquire(number); };
  events.on_answer = [](uint64_t, const StoreAnswer&) {};
  events.on_report = [this, number](const std::string& payload) { onReport(number, payload); };
  events.on_end = [this, number](const std::string& why) { onEnd(number, why); };
  members->open(number, address, std::move(events));
}

void JobInquiry::Course::onReport(size_t number, const std::string& payload) {
  std::optional<JobReport> told = decodeJobReport(payload);
  if (!told) return onEnd(number, "it answers in words that make no sense");
  members->close(number);
  const MutexLock lock(mutex);
  asked[number].over = asked[number].reported = true;
  if (isBetter(*told, report)) report = std::move(told);
  changed.notifyAll();
}

void JobInquiry::Course::onEnd(size_t number, const std::string& why) {
  const MutexLock lock(mutex);
  asked[number].over = true;
  asked[number].why_not = why;
  changed.notifyAll();
}

void JobInquiry::Course::probe(const Member& member) {
  const MemberId id = member.id;
  const auto tell = [this, id](const ProbeAnswer& answer) {
    const MutexLock lock(mutex);
    heard[id] = answer;
    changed.notifyAll();
  };
  const auto record = decodeRecord(member.record);
  const auto address = record ? portOf(*record) : std::nullopt;
  if (!address) return tell({Liveness::kUnknown, "it has told of no port", {}, 0});
  ProbePatience patience;
  patience.connect = kProbeWithin;
  patience.answer = kProbeWithin;
  probes[id] = std::make_unique<Probe>(
      loop, ProbeQuestion{selfIncarnation(), record->incarnation, {*address}}, patience, tell);
}

}  // namespace torchft_ext

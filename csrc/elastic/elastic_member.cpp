#include "elastic/elastic_member.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "base/host_name.h"
#include "base/mutex.h"
#include "base/task_thread.h"
#include "elastic/elastic_core.h"
#include "elastic/member_network.h"
#include "torchft_ext/failure.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kTick{20};
constexpr milliseconds kPoll{10};           // of the store, while a job is founded
constexpr milliseconds kBetweenTries{100};  // to reach the store
constexpr std::chrono::seconds kStopWithin{1};
constexpr size_t kMostEarly = 65536;
constexpr int kTicksBetweenQuestions = 25;

Member makeSelf(const Incarnation& incarnation, const std::vector<SocketAddress>& addresses) {
  MemberRecord record;
  record.incarnation = incarnation;
  record.host = hostName();
  record.pid = ::getpid();
  record.addresses = addresses;
  return {MemberId::random(), 0, encodeRecord(record)};
}

std::string nameOfRecord(const std::string& bytes) {
  const auto record = decodeRecord(bytes);
  if (!record) return "an unknown process";
  return record->host + ", pid " + std::to_string(record->pid);
}

const char* wordFor(Loss loss) {
  switch (loss) {
    case Loss::kDead:
      return "its process ended";
    case Loss::kFrozen:
      return "it does not answer";
    case Loss::kUnreachable:
      return "it cannot be reached";
  }
  return "";
}

}  // namespace

struct ElasticMember::Impl : std::enable_shared_from_this<Impl> {
  explicit Impl(ElasticOptions given)
      : options(std::move(given)),
        job_store(options.store, options.prefix),
        loop("ft-elastic"),
        store_thread("ft-jobstore"),
        stop_thread("ft-stopped"),
        server([this](const MemberId& to, uint64_t number, const StoreAnswer& answer) {
          reply(to, number, answer);
        }) {}

  // ---- any thread
  void start(Deadline deadline, const Cancelled& cancelled);
  void stop();
  template <typename Ask>
  std::invoke_result_t<Ask> onStore(const Ask& call, Deadline deadline, const Cancelled& cancelled);
  JobKey awaitStore(Deadline deadline, const Cancelled& cancelled);
  Founding findPlace(Deadline deadline, const Cancelled& cancelled);
  void wait(const std::function<bool()>& done, Deadline deadline, const Cancelled& cancelled)
      REQUIRES(mutex);
  [[noreturn]] void throwNoView() REQUIRES(mutex);
  [[noreturn]] void throwNoAnswer(uint64_t index) REQUIRES(mutex);
  std::string nameOfLocked(const MemberId& id) const REQUIRES(mutex);

  // ---- loop
  void begin(const Founding& founding, const std::vector<Member>& contacts);
  void carryOut(ElasticEffects effects);
  void announce(const ElasticEffects& effects);
  void tellStopped(uint64_t view_number, const std::string& why);
  void sendAll(const std::vector<ElasticEffects::Envelope>& sends);
  void askHost();
  void lookForContacts();
  void hearContacts(const std::vector<Member>& members);
  void askWitness(const WitnessRequest& request);
  void onMessage(const MemberId& from, const FrameHeader& header, const std::string& payload);
  void onLost(const MemberId& id, Loss loss, const std::string& how);
  void onNewView();
  void tick();
  void arm();
  void callHost(uint64_t number);
  void reply(const MemberId& to, uint64_t number, const StoreAnswer& answer);
  void completeCall(uint64_t number, std::optional<StoreAnswer> answer);
  void failCalls(uint64_t before_view);
  void publish();
  std::set<MemberId> known() const;
  bool isNeeded() const;

  const ElasticOptions options;
  JobStore job_store;  // store thread
  EventLoop loop;
  TaskThread store_thread;
  TaskThread stop_thread;
  std::unique_ptr<MemberNetwork> network;  // loop
  std::optional<ElasticCore> core;         // loop
  ViewStoreServer server;                  // loop
  EventLoop::TimerId timer = 0;
  int ticks = 0;
  bool witness_busy = false;
  bool ending = false;
  std::shared_ptr<Impl> keep_alive;  // for ever, where a thread that uses it cannot be ended
  uint64_t said_contacts = 0;
  bool forming = false;
  struct Early {
    MemberId from;
    FrameHeader header;
    std::string payload;
  };
  std::vector<Early> early;  // came before the core was there
  std::set<MemberId> gone_soon;
  bool unpublished = false;  // newcomers do not find this view's members yet
  int looks_without_members = 0;
  std::vector<MemberId> waiting_ids;  // as announced last
  std::set<MemberId> before;          // of the view before: who is left out has to be told

  struct Call {
    StoreCall call;
    std::optional<StoreAnswer> answer;
    bool lost = false;
  };
  mutable Mutex mutex;
  CondVar changed;
  Member self GUARDED_BY(mutex);
  View view GUARDED_BY(mutex);
  View view_before GUARDED_BY(mutex);
  ElasticRules rules GUARDED_BY(mutex);
  std::vector<MemberId> unheard GUARDED_BY(mutex);  // whose word an agreement awaits
  std::vector<std::string> waiting GUARDED_BY(mutex);
  std::map<std::pair<uint64_t, uint64_t>, Answer> answers GUARDED_BY(mutex);
  std::pair<uint64_t, uint64_t> asked GUARDED_BY(mutex){0, 0};
  bool agreeing GUARDED_BY(mutex) = false;
  bool left_out GUARDED_BY(mutex) = false;
  uint64_t over GUARDED_BY(mutex) = 0;  // this view, and those before
  bool left GUARDED_BY(mutex) = false;
  bool stopped GUARDED_BY(mutex) = false;
  std::map<MemberId, Loss> lost GUARDED_BY(mutex);
  std::vector<MemberId> missing GUARDED_BY(mutex);  // for a quorum; empty: nobody that is known
  bool hopeless GUARDED_BY(mutex) = false;
  bool forsaken GUARDED_BY(mutex) = false;  // a newcomer to a job of which nobody lives
  std::string store_trouble GUARDED_BY(mutex);
  std::map<MemberId, std::string> known_names GUARDED_BY(mutex);
  std::map<uint64_t, std::shared_ptr<Call>> calls GUARDED_BY(mutex);
  uint64_t next_call GUARDED_BY(mutex) = 1;
};

// ---- joining

template <typename Ask>
std::invoke_result_t<Ask> ElasticMember::Impl::onStore(const Ask& call, Deadline deadline,
                                                       const Cancelled& cancelled) {
  using Result = std::invoke_result_t<Ask>;
  struct State {
    std::optional<Result> result;
    std::string error;
    bool done = false;
  };
  auto state = std::make_shared<State>();
  const bool posted = store_thread.post([self = shared_from_this(), state, call] {
    std::optional<Result> result;
    std::string error;
    try {
      result = call();
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    MutexLock lock(self->mutex);
    state->result = std::move(result);
    state->error = error;
    state->done = true;
    self->changed.notifyAll();
  });
  MutexLock lock(mutex);
  if (posted) wait([&] { return state->done; }, deadline, cancelled);
  if (!state->done || !state->error.empty()) {
    throw ElasticError(ElasticErrorKind::kStore,
                       "elastic.join: job '" + options.job + "': the store " +
                           (state->done ? "failed: " + state->error
                                        : std::string("did not answer by the deadline")) +
                           "; see that it runs and can be reached from here");
  }
  return std::move(*state->result);
}

void ElasticMember::Impl::wait(const std::function<bool()>& done, Deadline deadline,
                               const Cancelled& cancelled) {
  while (!done() && !deadline.expired()) {
    if (!cancelled) {
      changed.waitUntil(mutex, deadline);
      continue;
    }
    changed.waitUntil(mutex, deadline.orEarlier(kPoll));
    mutex.unlock();
    bool give_up = false;
    try {
      give_up = cancelled();
    } catch (...) {
      mutex.lock();
      throw;
    }
    mutex.lock();
    if (give_up) return;
  }
}

// The store may come up later than those who meet there.
JobKey ElasticMember::Impl::awaitStore(Deadline deadline, const Cancelled& cancelled) {
  for (;;) {
    try {
      return onStore([this] { return job_store.key(); }, deadline, cancelled);
    } catch (const ElasticError&) {
      if (deadline.expired()) throw;
    }
    MutexLock lock(mutex);
    wait([] { return false; }, deadline.orEarlier(kBetweenTries), cancelled);
  }
}

void ElasticMember::Impl::start(Deadline deadline, const Cancelled& cancelled) {
  const JobKey key = awaitStore(deadline, cancelled);
  auto error = std::make_shared<std::string>();
  auto me = std::make_shared<Member>();
  const std::weak_ptr<Impl> weak = weak_from_this();
  loop.runOnLoop(
      [this, weak, key, error, me] {
        MemberNetwork::Events events;
        events.on_message = [this](const MemberId& from, const FrameHeader& header,
                                   const std::string& payload) {
          onMessage(from, header, payload);
        };
        events.on_connected = [this](const MemberId& id) {
          if (!core) return;
          carryOut(core->connected(id));
          MutexLock lock(mutex);
          if (view.members.empty() || view.members.front().id != id) return;
          for (const auto& [number, call] : calls) {
            loop.post([this, number = number] { callHost(number); });
          }
        };
        events.on_lost = [this](const MemberId& id, Loss loss, const std::string& how) {
          onLost(id, loss, how);
        };
        events.on_goodbye = [this](const MemberId& id) { gone_soon.insert(id); };
        network = std::make_unique<MemberNetwork>(loop, key, options.limit, std::move(events));
        *error = network->open(options.bind_address, options.ports);
        if (!error->empty()) return;
        *me = makeSelf(network->incarnation(), network->addresses());
        network->setSelf(*me);
      },
      deadline);
  if (!error->empty() || me->id.isZero()) {
    throw ElasticError(ElasticErrorKind::kNetwork,
                       "elastic.join: job '" + options.job + "': no port to listen on: " +
                           (error->empty() ? "the member's thread did not get to it" : *error));
  }
  {
    MutexLock lock(mutex);
    self = *me;
  }
  const Founding founding = findPlace(deadline, cancelled);
  {
    MutexLock lock(mutex);
    rules = founding.rules;
  }
  std::vector<Member> contacts = founding.view.members;
  if (!founding.view.has(me->id)) {
    const auto late = onStore([this] { return job_store.contacts(); }, deadline, cancelled);
    if (!late.empty()) contacts = late;
  }
  loop.post([this, founding, contacts] { begin(founding, contacts); });
}

// The job's founding, whoever took part in it.
Founding ElasticMember::Impl::findPlace(Deadline deadline, const Cancelled& cancelled) {
  Member me;
  {
    MutexLock lock(mutex);
    me = self;
  }
  const auto known = onStore([this] { return job_store.founding(); }, deadline, cancelled);
  if (known) return *known;
  onStore(
      [this, me] {
        job_store.takeSeat(me);
        return true;
      },
      deadline, cancelled);
  for (;;) {
    const auto founded = onStore([this] { return job_store.founding(); }, deadline, cancelled);
    if (founded) return *founded;
    std::vector<Member> seats = onStore([this] { return job_store.seats(); }, deadline, cancelled);
    if (seats.size() >= static_cast<size_t>(options.size)) {
      Founding proposed;
      proposed.rules = options.rules;
      proposed.view.lineage = Lineage::random();
      proposed.view.number = 1;
      seats.resize(static_cast<size_t>(options.size));
      for (Member& seat : seats) seat.since = 1;
      proposed.view.members = seats;
      for (const Member& seat : seats) proposed.view.voters.push_back(seat.id);
      return onStore([this, proposed] { return job_store.found(proposed); }, deadline, cancelled);
    }
    MutexLock lock(mutex);
    if (deadline.expired()) {
      throw ElasticError(ElasticErrorKind::kTimeout,
                         "elastic.join: job '" + options.job + "': expected " +
                             std::to_string(options.size) + " processes, found " +
                             std::to_string(seats.size()) +
                             " by the deadline; start the others, or give a smaller size");
    }
    bool never = false;
    wait([&] { return never; }, deadline.orEarlier(kPoll), cancelled);
  }
}

void ElasticMember::Impl::begin(const Founding& founding, const std::vector<Member>& contacts) {
  Member me;
  {
    MutexLock lock(mutex);
    me = self;
  }
  std::vector<MemberId> ids;
  for (const Member& contact : contacts) {
    network->introduce(contact);
    ids.push_back(contact.id);
  }
  if (founding.view.has(me.id)) {
    me.since = 1;
    core.emplace(me, founding.rules, founding.view);
    onNewView();
  } else {
    core.emplace(me, founding.rules, ids);
  }
  for (const Early& one : std::exchange(early, {})) onMessage(one.from, one.header, one.payload);
  arm();
  tick();
}

// ---- the loop

void ElasticMember::Impl::arm() {
  if (ending) return;
  timer = loop.runAt(Clock::now() + kTick, [this] {
    arm();
    tick();
  });
}

// Only while something is awaited is anything said again.
void ElasticMember::Impl::tick() {
  ++ticks;
  const bool joining = core->state() == ElasticCore::State::kJoining;
  if (joining && ticks % kTicksBetweenQuestions == 0) lookForContacts();
  const bool question = ticks % kTicksBetweenQuestions == 0;
  // Who waits for a place may wait for long.
  const bool patient = joining && ticks > 2 * kTicksBetweenQuestions;
  if ((joining || core->wanted()) && (question || !patient)) carryOut(core->retry());
  if (!question) return;
  carryOut(core->askAgain());
  if (unpublished) publish();
  askHost();
  for (const MemberId& id : core->unheard()) network->ask(id);
  if (!forming) return;
  for (const Member& member : core->view().members) network->ask(member.id);
}

void ElasticMember::Impl::sendAll(const std::vector<ElasticEffects::Envelope>& sends) {
  FrameHeader header;
  header.type = FrameType::kElastic;
  const ElasticMessage* encoded = nullptr;
  std::string bytes;
  for (const auto& [to, message] : sends) {
    if (message.get() != encoded) bytes = encodeElasticMessage(*message);
    encoded = message.get();
    network->send(to, header, bytes);
  }
}

void ElasticMember::Impl::carryOut(ElasticEffects effects) {
  if (effects.stopped) {
    const uint64_t stopped = core->view().number - (effects.new_view ? 1 : 0);
    tellStopped(stopped, "the members decide on another view");
  }
  if (effects.new_view) onNewView();
  sendAll(effects.sends);
  if (effects.witness) askWitness(*effects.witness);
  if (effects.left_out) network->finish();
  announce(effects);
}

void ElasticMember::Impl::tellStopped(uint64_t view_number, const std::string& why) {
  {
    MutexLock lock(mutex);
    over = std::max(over, view_number);
  }
  if (!options.on_stopped) return;
  stop_thread.post([stopped = options.on_stopped, view_number, why] { stopped(view_number, why); });
}

// What waits for this in calls of other threads.
void ElasticMember::Impl::announce(const ElasticEffects& effects) {
  MutexLock lock(mutex);
  for (const Outcome& outcome : effects.answers) {
    answers[{outcome.view, outcome.index}] = outcome.answer;
  }
  left_out = left_out || effects.left_out;
  if (!effects.no_quorum.empty()) {
    missing = effects.no_quorum;
    hopeless = effects.hopeless;
  }
  if (lost != core->losses()) lost = core->losses();
  std::erase_if(missing,
                [&](const MemberId& id) NO_THREAD_SAFETY_ANALYSIS { return !lost.contains(id); });
  unheard = core->unheard();
  if (std::vector<MemberId> ids = core->waiting(); ids != waiting_ids) {
    waiting_ids = std::move(ids);
    waiting.clear();
    for (const MemberId& id : waiting_ids) waiting.push_back(nameOfLocked(id));
  }
  if (!effects.answers.empty() || left_out || !missing.empty()) changed.notifyAll();
}

void ElasticMember::Impl::onNewView() {
  const View& now = core->view();
  for (const Member& member : now.members) network->introduce(member);
  server.begin(now.number);
  {
    MutexLock lock(mutex);
    for (const Member& member : now.members) known_names[member.id] = nameOfRecord(member.record);
    view_before = std::exchange(view, now);
    // At once: who awaits a view must not get one without this member.
    left_out = left_out || core->state() == ElasticCore::State::kLeftOut;
    missing.clear();
    hopeless = false;
    changed.notifyAll();
  }
  failCalls(now.number);
  network->keepOnly(known());
  before = core->everybody();
  // Connections that agreements will want.
  for (const Member& member : now.members) network->prepare(member.id);
  if (!now.members.empty() && now.members.front().id == core->self().id) publish();
}

// Is there a member that may still wait for this one's word?
bool ElasticMember::Impl::isNeeded() const {
  if (!core || core->state() != ElasticCore::State::kActive) {
    return core && core->state() == ElasticCore::State::kStopped;
  }
  const std::vector<Member>& members = core->view().members;
  return std::any_of(members.begin(), members.end(), [&](const Member& member) {
    return member.id != core->self().id && !gone_soon.contains(member.id) &&
           !core->losses().contains(member.id);
  });
}

// Whom messages may still go to.
std::set<MemberId> ElasticMember::Impl::known() const {
  std::set<MemberId> ids = core->everybody();
  ids.insert(before.begin(), before.end());
  return ids;
}

// Where newcomers find the job; not waited for.
void ElasticMember::Impl::publish() {
  unpublished = false;
  store_thread.post([self = weak_from_this(), members = core->view().members] {
    const auto alive = self.lock();
    if (!alive) return;
    try {
      alive->job_store.setContacts(members);
    } catch (const StoreError&) {  // the job goes on without its store, which may come back
      alive->loop.post([self] {
        if (const auto still_alive = self.lock()) still_alive->unpublished = true;
      });
    }
  });
}

// A call of the view's store waits for its host: does that live?
void ElasticMember::Impl::askHost() {
  {
    MutexLock lock(mutex);
    if (calls.empty()) return;
  }
  if (!core->view().members.empty()) network->ask(core->view().members.front().id);
}

// The members that this newcomer knows of may have been replaced meanwhile.
void ElasticMember::Impl::lookForContacts() {
  store_thread.post([self = weak_from_this()] {
    const auto alive = self.lock();
    if (!alive) return;
    std::vector<Member> members;
    try {
      members = alive->job_store.contacts();
    } catch (const StoreError&) {
      return;  // the next look may succeed
    }
    alive->loop.post([self, members] {
      const auto still_alive = self.lock();
      if (still_alive && still_alive->core) still_alive->hearContacts(members);
    });
  });
}

void ElasticMember::Impl::hearContacts(const std::vector<Member>& members) {
  std::vector<MemberId> ids;
  for (const Member& member : members) {
    network->introduce(member);
    ids.push_back(member.id);
  }
  const bool alone = !ids.empty() && !core->setContacts(ids) && core->isForsaken();
  looks_without_members = alone ? looks_without_members + 1 : 0;
  if (looks_without_members < 2) return;  // others may just be taking over
  MutexLock lock(mutex);
  forsaken = true;
  changed.notifyAll();
}

void ElasticMember::Impl::askWitness(const WitnessRequest& request) {
  if (witness_busy) return;  // it is repeated
  witness_busy = true;
  store_thread.post([self = weak_from_this(), request] {
    const auto alive = self.lock();
    if (!alive) return;
    WitnessReply reply;
    reply.what = request.what;
    reply.lineage = request.lineage;
    reply.number = request.number;
    reply.ballot = request.ballot;
    std::string trouble;
    try {
      reply = alive->job_store.ask(request);
    } catch (const std::exception& error) {
      trouble = error.what();
    }
    {
      MutexLock lock(alive->mutex);
      alive->store_trouble = trouble;
    }
    alive->loop.post([self, reply] {
      const auto still_alive = self.lock();
      if (!still_alive) return;
      still_alive->witness_busy = false;
      if (still_alive->core) still_alive->carryOut(still_alive->core->witnessAnswered(reply));
    });
  });
}

void ElasticMember::Impl::onMessage(const MemberId& from, const FrameHeader& header,
                                    const std::string& payload) {
  if (!core) {  // the others were quicker
    if (early.size() < kMostEarly) early.push_back({from, header, payload});
    return;
  }
  if (header.type == FrameType::kElastic) {
    const auto message = decodeElasticMessage(payload);
    if (!message) return;
    for (const Member& member : message->members) network->introduce(member);
    carryOut(core->receive(from, *message));
  } else if (header.type == FrameType::kCall) {
    auto call = decodeStoreCall(payload);
    if (!call) reply(from, header.seq, {StoreAnswer::Status::kOver, {}, 0});
    const bool later = call && call->view > core->view().number;
    if (call && (later || core->view().has(from)))
      server.onCall(from, header.seq, std::move(*call));
  } else if (header.type == FrameType::kAnswer) {
    completeCall(header.seq, decodeStoreAnswer(payload));
  }
}

void ElasticMember::Impl::onLost(const MemberId& id, Loss loss, const std::string& how) {
  if (!core) return;
  const bool host = !core->view().members.empty() && core->view().members.front().id == id;
  if (host) failCalls(core->view().number + 1);
  if (forming && core->view().has(id)) {
    std::string name;
    {
      MutexLock lock(mutex);
      name = nameOfLocked(id);
    }
    tellStopped(core->view().number, "member " + name + ": " + how);
  }
  carryOut(core->lose(id, loss));
}

// ---- the view's store

void ElasticMember::Impl::callHost(uint64_t number) {
  StoreCall call;
  {
    MutexLock lock(mutex);
    const auto found = calls.find(number);
    if (found == calls.end()) return;
    call = found->second->call;
  }
  if (!core || core->view().number > call.view || core->view().members.empty()) {
    completeCall(number, std::nullopt);
    return;
  }
  const MemberId host = core->view().members.front().id;
  if (host == core->self().id) {
    server.onCall(host, number, std::move(call));
    return;
  }
  FrameHeader header;
  header.type = FrameType::kCall;
  header.seq = number;
  network->send(host, header, encodeStoreCall(call));
}

void ElasticMember::Impl::reply(const MemberId& to, uint64_t number, const StoreAnswer& answer) {
  if (to == core->self().id) {
    completeCall(number, answer);
    return;
  }
  FrameHeader header;
  header.type = FrameType::kAnswer;
  header.seq = number;
  network->send(to, header, encodeStoreAnswer(answer));
}

void ElasticMember::Impl::completeCall(uint64_t number, std::optional<StoreAnswer> answer) {
  MutexLock lock(mutex);
  const auto found = calls.find(number);
  if (found == calls.end()) return;
  found->second->answer = std::move(answer);
  found->second->lost = !found->second->answer;
  calls.erase(found);
  changed.notifyAll();
}

void ElasticMember::Impl::failCalls(uint64_t before_view) {
  MutexLock lock(mutex);
  for (auto call = calls.begin(); call != calls.end();) {
    const auto next = std::next(call);
    if (call->second->call.view < before_view) {
      call->second->lost = true;
      calls.erase(call);
    }
    call = next;
  }
  changed.notifyAll();
}

void ElasticMember::Impl::stop() {
  {
    MutexLock lock(mutex);
    if (std::exchange(stopped, true)) return;
    left = true;
    changed.notifyAll();
  }
  loop.runOnLoop(
      [this] {
        ending = true;
        loop.cancel(timer);
        network.reset();
        core.reset();
      },
      Deadline::after(kStopWithin));
  // A loop that is still busy may not lose what it works with.
  if (!loop.stop(Deadline::after(kStopWithin))) {
    keep_alive = shared_from_this();
  }
  stop_thread.stop(Deadline::after(kStopWithin));
  store_thread.stop(Deadline::after(kStopWithin));
}

std::string ElasticMember::Impl::nameOfLocked(const MemberId& id) const {
  const auto found = known_names.find(id);
  const std::string name = found == known_names.end() ? "a newcomer" : found->second;
  const auto gone = lost.find(id);
  return gone == lost.end() ? name : name + " (" + wordFor(gone->second) + ")";
}

void ElasticMember::Impl::throwNoAnswer(uint64_t index) {
  if (left || left_out || !missing.empty() || unheard.empty()) throwNoView();
  std::string names;
  for (const MemberId& id : unheard) names += (names.empty() ? "" : "; ") + nameOfLocked(id);
  throw ElasticError(ElasticErrorKind::kTimeout,
                     "elastic job '" + options.job + "': agreement " + std::to_string(index) +
                         " of view " + std::to_string(view.number) +
                         ": no word by the deadline of " + names +
                         "; the next call takes it up, or leave them out by recover()");
}

void ElasticMember::Impl::throwNoView() {
  const std::string job = "elastic job '" + options.job + "': ";
  if (left) throw ElasticError(ElasticErrorKind::kState, job + "this member has left; join again");
  if (left_out) {
    throw ElasticError(ElasticErrorKind::kLeftOut,
                       job + "view " + std::to_string(view.number) +
                           " is without this member, which was silent or cut off: join again");
  }
  if (forsaken) {
    throw ElasticError(ElasticErrorKind::kNoQuorum,
                       job +
                           "it was founded before, and none of its members runs any more: choose "
                           "another name for a new job");
  }
  if (!missing.empty()) {
    std::string names;
    for (const MemberId& id : missing) names += (names.empty() ? "" : "; ") + nameOfLocked(id);
    std::string text =
        job + "no quorum for the view after " + std::to_string(view.number) + ": missing " + names;
    if (!store_trouble.empty()) text += "; the store: " + store_trouble;
    const char* advice = hopeless ? ". Start the job anew from a checkpoint, under another name"
                                  : ". Wait longer for them, or start the job anew from a "
                                    "checkpoint, under another name";
    throw ElasticError(ElasticErrorKind::kNoQuorum, text + advice);
  }
  throw ElasticError(ElasticErrorKind::kTimeout,
                     job + "no view newer than " + std::to_string(view.number) +
                         " by the deadline; see whether its members still run");
}

// ---- public

std::shared_ptr<ElasticMember> ElasticMember::join(ElasticOptions options, Deadline deadline,
                                                   const Cancelled& cancelled) {
  auto impl = std::make_shared<Impl>(std::move(options));
  std::shared_ptr<ElasticMember> member(new ElasticMember(impl));
  impl->start(deadline, cancelled);
  return member;
}

ElasticMember::~ElasticMember() {
  if (forks_ == forkCount()) {
    impl_->stop();
  } else {  // its descriptors and loop are the parent's too
    impl_->keep_alive = impl_;
  }
}

void ElasticMember::requireOwnProcess() const {
  if (forks_ == forkCount()) return;
  throw ElasticError(ElasticErrorKind::kState,
                     "elastic: this member belongs to the process that forked this one: join here");
}

MemberId ElasticMember::id() const {
  requireOwnProcess();
  MutexLock lock(impl_->mutex);
  return impl_->self.id;
}

View ElasticMember::view() const {
  requireOwnProcess();
  MutexLock lock(impl_->mutex);
  return impl_->view;
}

std::vector<std::string> ElasticMember::waiting() const {
  requireOwnProcess();
  MutexLock lock(impl_->mutex);
  return impl_->waiting;
}

ElasticRules ElasticMember::rules() const {
  MutexLock lock(impl_->mutex);
  return impl_->rules;
}

std::string ElasticMember::nameOf(const MemberId& id) const {
  MutexLock lock(impl_->mutex);
  return impl_->nameOfLocked(id);
}

std::vector<MemberId> ElasticMember::leftOutSince(const View& view) const {
  MutexLock lock(impl_->mutex);
  std::vector<MemberId> ids;
  for (const Member& member : impl_->view_before.members) {
    if (!view.has(member.id)) ids.push_back(member.id);
  }
  return ids;
}

View ElasticMember::awaitView(uint64_t newer_than, Deadline deadline, const Cancelled& cancelled,
                              const std::set<MemberId>& unreachable,
                              const std::set<MemberId>& leave_out) {
  requireOwnProcess();
  impl_->loop.post([impl = impl_, newer_than, unreachable, leave_out] {
    if (!impl->core) return;
    impl->core->setReady(true);
    if (impl->core->view().number > newer_than) return;
    impl->core->cannotReach(unreachable);
    impl->core->leaveOut(leave_out);
    impl->carryOut(impl->core->want(newer_than));
  });
  MutexLock lock(impl_->mutex);
  const auto over = [&]() NO_THREAD_SAFETY_ANALYSIS {
    return impl_->view.number > newer_than || impl_->left_out || impl_->left || impl_->hopeless ||
           impl_->forsaken;
  };
  impl_->wait(over, deadline, cancelled);
  if (impl_->view.number > newer_than && !impl_->left_out && !impl_->left) return impl_->view;
  impl_->throwNoView();
}

void ElasticMember::suspect(const std::set<MemberId>& ids) {
  impl_->loop.post([impl = impl_, ids] {
    if (!impl->core) return;
    for (const MemberId& id : ids) {
      if (!impl->core->view().has(id) || id == impl->core->self().id) continue;
      impl->network->ask(id);
      impl->carryOut(impl->core->lose(id, Loss::kFrozen));
    }
  });
}

void ElasticMember::setReady(bool ready) {
  impl_->loop.post([impl = impl_, ready] {
    if (impl->core) impl->core->setReady(ready);
  });
}

void ElasticMember::watchForming(bool forming) {
  impl_->loop.post([impl = impl_, forming] { impl->forming = forming; });
}

bool ElasticMember::isOver(uint64_t view) const {
  requireOwnProcess();
  MutexLock lock(impl_->mutex);
  return impl_->over >= view || impl_->view.number > view;
}

// An answer holds everybody's, and a message two answers and more.
void ElasticMember::checkNote(const std::string& note) const {
  constexpr size_t kAll = size_t{1} << 20U;
  MutexLock lock(impl_->mutex);
  const size_t most =
      std::min(kLongestNote, kAll / std::max<size_t>(impl_->view.members.size(), 1));
  if (note.size() <= most) return;
  throw std::invalid_argument("agree: note: expected at most " + std::to_string(most) +
                              " bytes among " + std::to_string(impl_->view.members.size()) +
                              " members, found " + std::to_string(note.size()));
}

Answer ElasticMember::agree(uint64_t view, Vote vote, Deadline deadline,
                            const Cancelled& cancelled) {
  requireOwnProcess();
  checkNote(vote.note);
  std::pair<uint64_t, uint64_t> wanted;
  bool fresh = false;
  {
    MutexLock lock(impl_->mutex);
    fresh = !(impl_->agreeing && impl_->asked.first == view);
    if (fresh) {
      impl_->asked = {view, impl_->asked.first == view ? impl_->asked.second + 1 : 1};
      impl_->agreeing = true;
    }
    wanted = impl_->asked;
  }
  if (fresh) {
    impl_->loop.post([impl = impl_, view, vote = std::move(vote)] {
      if (impl->core) impl->carryOut(impl->core->agree(view, vote));
    });
  }
  MutexLock lock(impl_->mutex);
  const auto over = [&]() NO_THREAD_SAFETY_ANALYSIS {
    return impl_->answers.contains(wanted) || impl_->left_out || impl_->left || impl_->hopeless;
  };
  impl_->wait(over, deadline, cancelled);
  const auto found = impl_->answers.find(wanted);
  if (found == impl_->answers.end()) impl_->throwNoAnswer(wanted.second);
  Answer answer = std::move(found->second);
  impl_->answers.erase(found);
  impl_->agreeing = false;
  return answer;
}

void ElasticMember::setLeaving() {
  impl_->loop.post([impl = impl_] {
    if (impl->core) impl->core->setLeaving();
  });
}

bool ElasticMember::leave(Deadline deadline) {
  if (forks_ != forkCount()) return true;
  {
    MutexLock lock(impl_->mutex);
    if (std::exchange(impl_->left, true)) return true;
    impl_->changed.notifyAll();
  }
  const auto onLoop = [impl = impl_, deadline](const std::function<bool()>& what) {
    auto done = std::make_shared<bool>(false);
    while (!*done) {
      if (!impl->loop.runOnLoop([what, done] { *done = what(); }, deadline)) return false;
      if (*done || deadline.expired()) break;
      MutexLock lock(impl->mutex);
      impl->changed.waitUntil(impl->mutex, deadline.orEarlier(milliseconds(2)));
    }
    return *done;
  };
  onLoop([impl = impl_] {
    if (impl->core) impl->core->setLeaving();
    if (impl->network) impl->network->sayGoodbye();
    return true;
  });
  const bool free = onLoop([impl = impl_] { return !impl->network || !impl->isNeeded(); });
  impl_->loop.post([impl = impl_] {
    if (impl->network) impl->network->finish();
  });
  onLoop([impl = impl_] { return !impl->network || impl->network->finished(); });
  impl_->stop();
  return free;
}

StoreAnswer ElasticMember::callStore(StoreCall call, Deadline deadline,
                                     const Cancelled& cancelled) {
  requireOwnProcess();
  const uint64_t of_view = call.view;
  size_t bytes = call.value.size() + call.expected.size();
  for (const std::string& key : call.keys) bytes += key.size();
  if (bytes > ViewStoreServer::kLongestCall) {
    throw StoreError("the store of view " + std::to_string(of_view) + ": expected at most " +
                     std::to_string(ViewStoreServer::kLongestCall) + " bytes in a call, found " +
                     std::to_string(bytes));
  }
  auto pending = std::make_shared<Impl::Call>();
  pending->call = std::move(call);
  uint64_t number = 0;
  {
    MutexLock lock(impl_->mutex);
    number = impl_->next_call++;
    impl_->calls[number] = pending;
  }
  if (!impl_->loop.post([impl = impl_, number] { impl->callHost(number); })) {
    throw StoreError("the store of view " + std::to_string(of_view) + ": this member has ended");
  }
  MutexLock lock(impl_->mutex);
  try {
    impl_->wait([&] { return pending->answer || pending->lost; }, deadline, cancelled);
  } catch (...) {
    impl_->calls.erase(number);
    throw;
  }
  impl_->calls.erase(number);
  if (pending->answer && pending->answer->status != StoreAnswer::Status::kOver) {
    return std::move(*pending->answer);
  }
  const bool over = pending->answer || pending->lost;
  throw StoreError(
      "the store of view " + std::to_string(of_view) +
      (over ? ": the view is over, or the store's host is lost" : ": no answer by the deadline"));
}

}  // namespace torchft_ext

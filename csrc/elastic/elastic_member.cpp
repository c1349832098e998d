#include "elastic/elastic_member.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/host_name.h"
#include "base/log.h"
#include "base/sole_copy.h"
#include "base/task_thread.h"
#include "elastic/elastic_core.h"
#include "elastic/job_founder.h"
#include "elastic/job_store_thread.h"
#include "elastic/meeting_server.h"
#include "elastic/member_network.h"
#include "elastic/member_status.h"
#include "elastic/view_check.h"
#include "elastic/view_store_client.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kTick{20};
constexpr milliseconds kBetweenLooks{2};  // of a leaver: has it got through?
constexpr std::chrono::seconds kStopWithin{1};
constexpr size_t kMostEarly = 65536;
constexpr int kTicksBetweenQuestions = 25;
constexpr int kLooksSpared = 8;  // of one for each question

Member makeSelf(const Incarnation& incarnation, const std::vector<SocketAddress>& addresses) {
  MemberRecord record;
  record.incarnation = incarnation;
  record.host = hostName();
  record.pid = ::getpid();
  record.addresses = addresses;
  return {MemberId::random(), 0, encodeRecord(record)};
}

ComparingStoreFactory noStore() {
  return []() -> std::unique_ptr<ComparingStore> { throw StoreError("the job has none"); };
}

}  // namespace

// The driver: what happens goes to the core, and what the core wants done is done here. Loop thread
// only, but for start(), stop() and what is marked; owned by its ElasticMember, and for ever by
// itself where a thread of its does not end.
struct ElasticMember::Impl : std::enable_shared_from_this<Impl> {
  explicit Impl(ElasticOptions given)
      : options(std::move(given)),
        status(options.job),
        loop("ft-elastic"),
        links(std::make_shared<MeetingLinks>(loop, MeetingKey{options.job, options.key})),
        store(options.job, options.store ? options.store : noStore(), options.prefix),
        listed(makeListed()),
        stop_thread("ft-stopped"),
        server([this](const MemberId& to, uint64_t number, const StoreAnswer& answer) {
          replyTo(to, number, answer);
        }),
        client(loop, [this](const MemberId& host, uint64_t number, const StoreCall& call) {
          sendCall(host, number, call);
        }) {}

  std::unique_ptr<JobStoreThread> makeListed();
  // Where the job is founded and found.
  JobStoreThread& meeting() { return listed ? *listed : store; }
  // ---- the joining thread
  void start(Deadline deadline, const Cancelled& cancelled);
  void listen(Deadline deadline);
  void openPlace();
  // ---- any thread
  void stop();
  bool untilOnLoop(const std::function<bool()>& done, Deadline deadline);

  MemberNetwork::Events events();
  void begin(const JobFounder::Place& found);
  void carryOut(const ElasticEffects& effects);
  void tellStopped(uint64_t view_number, const std::string& why);
  void sendAll(const std::vector<ElasticEffects::Envelope>& sends);
  void restoreStore();
  void lookForContacts();
  void hearContacts(const std::vector<Member>& members);
  void askWitness(const WitnessRequest& request);
  void onMessage(const MemberId& from, const FrameHeader& header, const std::string& payload);
  void onElastic(const MemberId& from, const std::string& payload);
  void logRefused(const std::string& whose, const std::string& why);
  void onCall(const MemberId& from, uint64_t number, const std::string& payload);
  void onLost(const MemberId& id, Loss loss, const std::string& how);
  void onNewView();
  void tick();
  void arm();
  void sendCall(const MemberId& host, uint64_t number, const StoreCall& call);
  void replyTo(const MemberId& to, uint64_t number, const StoreAnswer& answer);
  void publish();
  std::set<MemberId> known() const;
  bool isNeeded() const;

  const ElasticOptions options;
  MemberStatus status;
  EventLoop loop;
  std::shared_ptr<MeetingLinks> links;           // loop
  JobStoreThread store;                          // of the witness
  const std::unique_ptr<JobStoreThread> listed;  // null: the members meet in the store
  TaskThread stop_thread;                        // on_stopped may block
  std::shared_ptr<Impl> keep_alive;
  // Loop.
  std::unique_ptr<MemberNetwork> network;
  std::unique_ptr<MeetingServer> place;  // where others find this process; null: in the store alone
  std::optional<ElasticCore> core;
  ViewStoreServer server;
  ViewStoreClient client;
  EventLoop::TimerId timer = 0;
  int ticks = 0;
  bool witness_busy = false;
  bool restoring = false;
  int looks_spared = 0;  // at a store that has failed, which may hold up its thread
  Founding founding;     // the job's
  bool ending = false;
  bool forming = false;
  struct Early {
    Member from;
    FrameHeader header;
    std::string payload;
  };
  std::vector<Early> early;  // came before the core was there
  std::set<MemberId> gone_soon;
  bool unpublished = false;  // newcomers do not find this view's members yet
  int looks_without_members = 0;
  std::set<MemberId> before;      // of the view before: who is left out has to be told
  std::set<std::string> refused;  // whose word was not believed in this view, as the log names them
};

std::unique_ptr<JobStoreThread> ElasticMember::Impl::makeListed() {
  if (!options.listed) return nullptr;
  const auto connect = [this] {
    return std::make_unique<ListedStore>(loop, links, options.listed);
  };
  return std::make_unique<JobStoreThread>(options.job, connect, "", /*may_witness=*/false);
}

// ---- joining

void ElasticMember::Impl::start(Deadline deadline, const Cancelled& cancelled) {
  const JobFounder founder(meeting(), options.job, options.size, options.rules);
  listen(deadline);
  const JobFounder::Place found = founder.findPlace(status.self(), deadline, cancelled);
  status.setRules(found.founding.rules);
  loop.post([this, found] { begin(found); });
}

void ElasticMember::Impl::listen(Deadline deadline) {
  const auto error = std::make_shared<std::string>("the member's thread did not get to it");
  loop.runOnLoop(
      [this, self = shared_from_this(), error] {
        network = std::make_unique<MemberNetwork>(loop, options.limit, events());
        *error = network->open(options.bind_address, options.ports);
        if (!error->empty()) return;
        openPlace();
        const Member me = makeSelf(network->incarnation(), network->addresses());
        network->setSelf(me);
        status.setSelf(me);
      },
      deadline);
  if (error->empty()) return;
  throw ElasticError(ElasticErrorKind::kNetwork,
                     "elastic.join: job '" + options.job + "': no port to listen on: " + *error);
}

// Of a job that is found by the addresses of its members.
void ElasticMember::Impl::openPlace() {
  if (!listed) return;
  place = std::make_unique<MeetingServer>(loop, MeetingKey{options.job, options.key});
  network->admitVisitors(meetingNonce(options.job),
                         [this](Arrival& arrival) { return place && place->admit(arrival); });
}

MemberNetwork::Events ElasticMember::Impl::events() {
  MemberNetwork::Events events;
  events.on_message = [this](const MemberId& from, const FrameHeader& header,
                             const std::string& payload) { onMessage(from, header, payload); };
  events.on_connected = [this](const MemberId& id) {
    if (!core) return;
    carryOut(core->connected(id));
    client.connectedAgain(id);
  };
  events.on_lost = [this](const MemberId& id, Loss loss, const std::string& how) {
    onLost(id, loss, how);
  };
  events.on_goodbye = [this](const MemberId& id) { gone_soon.insert(id); };
  return events;
}

void ElasticMember::Impl::begin(const JobFounder::Place& found) {
  Member me = status.self();
  founding = found.founding;
  network->admitMembers(founding.key);
  std::vector<MemberId> ids;
  for (const Member& contact : found.contacts) {
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
  core->setSeed(ViewSecret::random());
  for (const Early& one : std::exchange(early, {})) {
    // The first view has kept its own members alone.
    if (network->memberOf(one.from.id).id.isZero()) network->introduce(one.from);
    onMessage(one.from.id, one.header, one.payload);
  }
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
  if (core->view().rankOf(core->self().id) == 0) restoreStore();
  // A call of the view's store waits for its host: does that live?
  if (const auto host = client.awaitedHost()) network->ask(*host);
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
    network->add(to, header, bytes);
  }
  network->flush();
}

void ElasticMember::Impl::carryOut(const ElasticEffects& effects) {
  if (effects.stopped) {
    const uint64_t stopped = core->view().number - (effects.new_view ? 1 : 0);
    tellStopped(stopped, "the members decide on another view");
  }
  if (effects.new_view) onNewView();
  sendAll(effects.sends);
  if (effects.witness) askWitness(*effects.witness);
  status.follow(*core, effects);
}

void ElasticMember::Impl::tellStopped(uint64_t view_number, const std::string& why) {
  status.setOver(view_number);
  client.stop(view_number);
  if (!options.on_stopped) return;
  stop_thread.post([stopped = options.on_stopped, view_number, why] { stopped(view_number, why); });
}

void ElasticMember::Impl::onNewView() {
  const View& now = core->view();
  if (now.has(core->self().id)) network->enterView(now);
  for (const Member& member : now.members) network->introduce(member);
  server.begin(now);
  status.begin(*core);
  client.begin(now);
  network->keepOnly(known());
  before = core->everybody();
  refused.clear();
  // Connections that agreements will want.
  for (const Member& member : now.members) network->prepare(member.id);
  if (place) {
    place->put("contacts", encodeMembers(now.members));
    place->put("founding", encodeFounding(founding));
    place->setFounded();
  }
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
  store.post([self = weak_from_this(), members = core->view().members](JobStore& job) {
    try {
      job.setContacts(members);
    } catch (const StoreError&) {  // the job goes on without its store, which may come back
      const auto alive = self.lock();
      if (alive) alive->loop.post([raw = alive.get()] { raw->unpublished = true; });
    }
  });
}

// Of the first member: is the store still the one it was?
void ElasticMember::Impl::restoreStore() {
  if (restoring || looks_spared-- > 0) return;
  restoring = true;
  store.post([self = weak_from_this(), founding = founding, lineage = core->view().lineage,
              members = core->view().members](JobStore& job) {
    // In an optional: of a plain one g++ 12 drops the initial zeroes, which hold where the call
    // throws.
    std::optional<WitnessId> identity;
    try {
      identity = job.restore(founding, lineage, members);
    } catch (const StoreError&) {  // the job goes on without it
      identity.reset();
    }
    const auto alive = self.lock();
    if (!alive) return;
    alive->loop.post([raw = alive.get(), identity] {
      raw->restoring = false;
      raw->looks_spared = identity ? 0 : kLooksSpared;
      if (raw->core) raw->core->setWitness(identity.value_or(WitnessId()));
    });
  });
}

// The members that this newcomer knows of may have been replaced meanwhile.
void ElasticMember::Impl::lookForContacts() {
  meeting().post([self = weak_from_this()](JobStore& job) {
    std::vector<Member> members;
    try {
      members = job.contacts();
    } catch (const StoreError&) {
      return;  // the next look may succeed
    }
    const auto alive = self.lock();
    if (!alive) return;
    alive->loop.post([raw = alive.get(), members] {
      if (raw->core) raw->hearContacts(members);
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
  if (looks_without_members >= 2) status.setForsaken();  // before, others may be taking over
}

void ElasticMember::Impl::askWitness(const WitnessRequest& request) {
  if (witness_busy) return;  // it is repeated
  witness_busy = true;
  store.post([self = weak_from_this(), request](JobStore& job) {
    WitnessReply reply;
    reply.what = request.what;
    reply.lineage = request.lineage;
    reply.number = request.number;
    reply.ballot = request.ballot;
    std::string trouble;
    try {
      reply = job.ask(request);
    } catch (const std::exception& error) {
      trouble = error.what();
    }
    const auto alive = self.lock();
    if (!alive) return;
    alive->status.setStoreTrouble(trouble);
    alive->loop.post([raw = alive.get(), reply] {
      raw->witness_busy = false;
      if (!raw->core) return;
      const ElasticEffects effects = raw->core->witnessAnswered(reply);
      if (!effects.refused.empty()) raw->logRefused("the store", effects.refused);
      raw->carryOut(effects);
    });
  });
}

void ElasticMember::Impl::onMessage(const MemberId& from, const FrameHeader& header,
                                    const std::string& payload) {
  if (!core) {  // the others were quicker
    if (early.size() < kMostEarly) early.push_back({network->memberOf(from), header, payload});
    return;
  }
  switch (header.type) {
    case FrameType::kElastic:
      onElastic(from, payload);
      break;
    case FrameType::kCall:
      onCall(from, header.seq, payload);
      break;
    case FrameType::kAnswer:
      if (client.isHost(from)) client.onAnswer(header.seq, decodeStoreAnswer(payload));
      break;
    default:
      break;
  }
}

void ElasticMember::Impl::onElastic(const MemberId& from, const std::string& payload) {
  const auto message = decodeElasticMessage(payload);
  if (!message) return;
  if (message->kind == ElasticKind::kJoin) {
    const std::string why = objectionToNewcomer(message->members.front(), network->memberOf(from));
    if (!why.empty()) return logRefused(status.nameOf(from), why);
  }
  const ElasticEffects effects = core->receive(from, *message);
  if (!effects.refused.empty()) logRefused(status.nameOf(from), effects.refused);
  carryOut(effects);
}

// Once for each view: whoever says it may say it again.
void ElasticMember::Impl::logRefused(const std::string& whose, const std::string& why) {
  if (!refused.insert(whose).second) return;
  log(LogLevel::kWarning,
      "elastic job '" + options.job + "': not believed of " + whose + ": " + why);
}

void ElasticMember::Impl::onLost(const MemberId& id, Loss loss, const std::string& how) {
  if (!core) return;
  client.onLost(id);
  if (forming && core->view().has(id)) {
    tellStopped(core->view().number, "member " + status.nameOf(id) + ": " + how);
  }
  carryOut(core->lose(id, loss));
}

// ---- the view's store

void ElasticMember::Impl::onCall(const MemberId& from, uint64_t number,
                                 const std::string& payload) {
  auto call = decodeStoreCall(payload);
  if (!call) {
    replyTo(from, number, {StoreAnswer::Status::kOver, {}, 0});
  } else if (call->view > core->view().number || core->view().has(from)) {
    server.onCall(from, number, *std::move(call));
  }
}

void ElasticMember::Impl::sendCall(const MemberId& host, uint64_t number, const StoreCall& call) {
  if (host == core->self().id) {
    server.onCall(host, number, call);
    return;
  }
  FrameHeader header;
  header.type = FrameType::kCall;
  header.seq = number;
  network->send(host, header, encodeStoreCall(call));
}

void ElasticMember::Impl::replyTo(const MemberId& to, uint64_t number, const StoreAnswer& answer) {
  if (to == core->self().id) {
    client.onAnswer(number, answer);
    return;
  }
  FrameHeader header;
  header.type = FrameType::kAnswer;
  header.seq = number;
  network->send(to, header, encodeStoreAnswer(answer));
}

// ---- the end

// Asks again and again on the loop. False: not by the deadline.
bool ElasticMember::Impl::untilOnLoop(const std::function<bool()>& done, Deadline deadline) {
  const auto found = std::make_shared<bool>(false);
  const auto look = [done, found] { *found = done(); };
  while (loop.runOnLoop(look, deadline)) {
    if (*found || deadline.expired()) return *found;
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return false;
}

void ElasticMember::Impl::stop() {
  loop.runOnLoop(
      [this] {
        ending = true;
        loop.cancel(timer);
        client.end();
        place.reset();
        links->finish();
        network.reset();
        core.reset();
      },
      Deadline::after(kStopWithin));
  // A loop that is still busy may not lose what it works with.
  if (!loop.stop(Deadline::after(kStopWithin))) {
    keep_alive = shared_from_this();
  }
  stop_thread.stop(Deadline::after(kStopWithin));
  store.stop(Deadline::after(kStopWithin));
  // Its store posts to the loop.
  if (listed && !listed->stop(Deadline::after(kStopWithin))) keep_alive = shared_from_this();
}

// ---- public

std::shared_ptr<ElasticMember> ElasticMember::join(ElasticOptions options, Deadline deadline,
                                                   const Cancelled& cancelled) {
  requireSoleCopy();  // here, and not on a thread
  auto impl = std::make_shared<Impl>(std::move(options));
  std::shared_ptr<ElasticMember> member(new ElasticMember(impl));
  impl->start(deadline, cancelled);
  return member;
}

ElasticMember::~ElasticMember() {
  if (forks_ != forkCount()) {  // its descriptors and loop are the parent's too
    impl_->keep_alive = impl_;
  } else if (impl_->status.leave()) {
    impl_->stop();
  }
}

void ElasticMember::requireOwnProcess() const {
  if (forks_ == forkCount()) return;
  throw ElasticError(ElasticErrorKind::kState,
                     "elastic: this member belongs to the process that forked this one: join here");
}

MemberId ElasticMember::id() const {
  requireOwnProcess();
  return impl_->status.self().id;
}

View ElasticMember::view() const {
  requireOwnProcess();
  return impl_->status.view();
}

std::vector<std::string> ElasticMember::waiting() const {
  requireOwnProcess();
  return impl_->status.waiting();
}

ElasticRules ElasticMember::rules() const {
  return impl_->status.rules();
}

std::string ElasticMember::nameOf(const MemberId& id) const {
  return impl_->status.nameOf(id);
}

std::vector<MemberId> ElasticMember::leftOutSince(const View& view) const {
  return impl_->status.leftOutSince(view);
}

View ElasticMember::goOnAlone(Deadline deadline, const Cancelled& cancelled) {
  requireOwnProcess();
  const uint64_t last = impl_->status.view().number;
  impl_->loop.post([impl = impl_] {
    if (!impl->core) return;
    impl->core->setReady(true);
    impl->carryOut(impl->core->beginLineage(Lineage::random()));
  });
  return impl_->status.awaitView(last, deadline, cancelled, /*without_quorum=*/true);
}

View ElasticMember::awaitView(uint64_t newer_than, Deadline deadline, const Cancelled& cancelled,
                              const std::set<MemberPair>& unreachable,
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
  return impl_->status.awaitView(newer_than, deadline, cancelled);
}

void ElasticMember::endView(uint64_t view) {
  impl_->loop.post([impl = impl_, view] {
    impl->loop.runAt(Clock::now() + kTick, [weak = std::weak_ptr(impl), view] {
      const auto alive = weak.lock();
      if (alive && alive->core) alive->carryOut(alive->core->want(view));
    });
  });
}

void ElasticMember::suspect(const std::map<MemberId, std::string>& lost) {
  impl_->status.setHow(lost);
  impl_->loop.post([impl = impl_, lost] {
    if (!impl->core) return;
    for (const auto& [id, how] : lost) {
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
  return impl_->status.isOver(view);
}

Answer ElasticMember::agree(uint64_t view, Vote vote, Deadline deadline,
                            const Cancelled& cancelled) {
  requireOwnProcess();
  impl_->status.checkNote(vote.note);
  const MemberStatus::Agreement agreement = impl_->status.beginAgreement(view);
  if (agreement.fresh) {
    impl_->loop.post([impl = impl_, view, vote = std::move(vote)] {
      if (impl->core) impl->carryOut(impl->core->agree(view, vote));
    });
  }
  return impl_->status.awaitAnswer(agreement, deadline, cancelled);
}

void ElasticMember::setLeaving() {
  impl_->loop.post([impl = impl_] {
    if (impl->core) impl->core->setLeaving();
  });
}

bool ElasticMember::leave(Deadline deadline) {
  if (forks_ != forkCount() || !impl_->status.leave()) return true;
  const auto impl = impl_;  // what runs late on the loop has it too
  impl->loop.post([impl] {
    if (impl->core) impl->core->setLeaving();
    if (impl->network) impl->network->sayGoodbye();
  });
  const auto isFree = [impl] { return !impl->network || !impl->isNeeded(); };
  const bool free = impl->untilOnLoop(isFree, deadline);
  impl->loop.post([impl] {
    if (impl->network) impl->network->finish();
  });
  impl->untilOnLoop([impl] { return !impl->network || impl->network->finished(); }, deadline);
  impl->stop();
  return free;
}

StoreAnswer ElasticMember::callStore(StoreCall call, Deadline deadline,
                                     const Cancelled& cancelled) {
  requireOwnProcess();
  return impl_->client.call(std::move(call), deadline, cancelled);
}

}  // namespace torchft_ext

#include "elastic/member_driver.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/host_name.h"
#include "base/log.h"
#include "elastic/elastic_codec.h"
#include "elastic/view_check.h"
#include "torchft_ext/elastic_error.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kBetweenLooks{2};  // of a leaver: has it got through?
constexpr std::chrono::seconds kStopWithin{1};
constexpr int kTicksBetweenQuestions = 25;
constexpr std::chrono::seconds kOnItsWay{1};  // a write to the store, of who has died since
constexpr int kLooksSpared = 8;               // of one for each question

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

MemberDriver::MemberDriver(ElasticOptions given)
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
      client(loop, [this](const MemberId& host, uint64_t number,
                          const StoreCall& call) { sendCall(host, number, call); }),
      admission(options.backoff) {}

std::unique_ptr<JobStoreThread> MemberDriver::makeListed() {
  if (!options.listed) return nullptr;
  const auto noted = [unanswered = unanswered](const std::string& addresses) {
    const MutexLock lock(unanswered->mutex);
    unanswered->addresses = addresses;
  };
  const auto connect = [this, noted] {
    return std::make_unique<ListedStore>(loop, links, options.listed, noted);
  };
  return std::make_unique<JobStoreThread>(options.job, connect, "", /*may_witness=*/false);
}

// ---- joining

void MemberDriver::start(Deadline deadline, const Cancelled& cancelled) {
  const auto unansweredNow = [unanswered = unanswered] {
    const MutexLock lock(unanswered->mutex);
    return unanswered->addresses;
  };
  const JobFounder founder(meeting(), options.job, options.size, options.rules, unansweredNow);
  listen(deadline);
  const JobFounder::Place found = founder.findPlace(status.self(), deadline, cancelled);
  status.setRules(found.founding.rules);
  const std::string differs = differenceFrom(found.founding);
  if (!differs.empty()) {
    log(LogLevel::kWarning, "elastic job '" + options.job + "': " + differs +
                                "; what it was founded with holds: start all with the same");
  }
  loop.post([this, found] { begin(found); });
}

// The options of this process that differ from the founding's, as text. Empty: none.
std::string MemberDriver::differenceFrom(const Founding& known) const {
  const auto ruleOf = [](const ElasticRules& rules) {
    return std::string(rules.store_rule ? "store" : "members");
  };
  std::string differs;
  const auto compare = [&](const char* name, const std::string& here, const std::string& there) {
    if (here == there) return;
    differs += (differs.empty() ? "" : ", ") + std::string(name) + "=" + here +
               " here, founded with " + there;
  };
  const ElasticRules& rules = known.rules;
  compare("size", std::to_string(options.size), std::to_string(known.view.members.size()));
  compare("min_size", std::to_string(options.rules.min_size), std::to_string(rules.min_size));
  compare("max_size", std::to_string(options.rules.max_size), std::to_string(rules.max_size));
  compare("rule", ruleOf(options.rules), ruleOf(rules));
  return differs;
}

void MemberDriver::listen(Deadline deadline) {
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
void MemberDriver::openPlace() {
  if (!listed) return;
  place = std::make_unique<MeetingServer>(loop, MeetingKey{options.job, options.key});
  network->admitClients(meetingNonce(options.job),
                        [this](Arrival& arrival) { return place && place->admit(arrival); });
}

MemberNetwork::Events MemberDriver::events() {
  MemberNetwork::Events events;
  events.on_message = [this](const MemberId& from, const FrameHeader& header,
                             const std::string& payload) { onMessage(from, header, payload); };
  events.on_connected = [this](const MemberId& id) {
    if (!core) return;
    unreachable.erase(id);
    carryOut(core->connected(id));
    client.connectedAgain(id);
  };
  events.on_disconnected = [this](const MemberId& id) {
    loseWay(id);
    if (core && !gone_soon.contains(id)) carryOut(core->disconnected(id));
  };
  events.on_lost = [this](const MemberId& id, Loss loss, const std::string& how) {
    onLost(id, loss, how);
  };
  events.on_alive = [this](const MemberId& id) { sole_holders.forget(id); };
  events.on_goodbye = [this](const MemberId& id) { gone_soon.insert(id); };
  return events;
}

void MemberDriver::begin(const JobFounder::Place& found) {
  Member me = status.self();
  founding = found.founding;
  network->admitMembers(founding.key);
  openInquiries();
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
  began = Clock::now();
  ways.setTargets({ids.begin(), ids.end()});
  arm();
  tick();
}

// For processes that know the founding, as newcomers do, and take no place.
void MemberDriver::openInquiries() {
  const MeetingKey key = inquiryKey(founding.key);
  inquiries = std::make_unique<MeetingServer>(loop, key);
  inquiries->answerInquiries([this] { return encodeJobReport(report()); });
  network->admitClients(meetingNonce(key.job), [this](Arrival& arrival) {
    return core && inquiries && inquiries->admit(arrival);
  });
}

JobReport MemberDriver::report() const {
  JobReport report;
  status.describe(report);
  if (options.waits)
    for (std::string& wait : options.waits()) report.waits.push_back(std::move(wait));
  const ElasticCore::State state = core->state();
  if (state == ElasticCore::State::kLeftOut) report.by = ReportedBy::kLeftOut;
  if (report.view > 0 && state != ElasticCore::State::kLeftOut) report.by = ReportedBy::kMember;
  report.deciding = state == ElasticCore::State::kStopped || core->wanted();
  report.store_rule = founding.rules.store_rule;
  report.min_size = founding.rules.min_size;
  report.max_size = founding.rules.max_size;
  report.waiting = reportWaiting();
  std::set<MemberId> there;
  std::set<MemberId> needed;
  for (const Member& member : core->view().members) {
    if (!core->losses().contains(member.id)) there.insert(member.id);
    if (sole_holders.has(member.id)) needed.insert(member.id);
  }
  judgeLosses(report, core->view(), founding.rules, there, needed);
  return report;
}

std::vector<ReportedMember> MemberDriver::reportWaiting() const {
  std::vector<ReportedMember> waiting;
  for (Member& newcomer : core->newcomers()) {
    if (waiting.size() >= kMostReported) break;
    ReportedMember one;
    one.member = std::move(newcomer);
    waiting.push_back(std::move(one));
  }
  return waiting;
}

// ---- the loop

void MemberDriver::arm() {
  if (ending) return;
  timer = loop.runAt(Clock::now() + kTick, [this] {
    arm();
    tick();
  });
}

// Only while something is awaited is anything said again.
void MemberDriver::tick() {
  ++ticks;
  holdBack();
  const bool joining = core->state() == ElasticCore::State::kJoining;
  if (joining) probeWays();
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
  for (const MemberId& id : sole_holders.awaited()) network->ask(id);
  for (const MemberId& id : sole_holders.expired(Clock::now())) lose(id, Loss::kFrozen);
  for (const MemberId& id : core->unheard()) network->ask(id);
  if (!forming) return;
  for (const Member& member : core->view().members) network->ask(member.id);
}

void MemberDriver::sendAll(const std::vector<ElasticEnvelope>& sends) {
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

void MemberDriver::carryOut(const ElasticEffects& effects) {
  if (effects.stopped) {
    const uint64_t stopped = core->view().number - (effects.new_view ? 1 : 0);
    tellStopped(stopped, kAnotherView);
  }
  if (effects.new_view) onNewView();
  sendAll(effects.sends);
  if (effects.witness) askWitness(*effects.witness);
  if (effects.left_out && core->isIsolated()) network->finish();  // others must not wait for it
  status.follow(*core, effects, isHopeless(effects));
}

bool MemberDriver::isHopeless(const ElasticEffects& effects) const {
  return effects.hopeless && (stays_undecided || !founding.rules.storeDecidesAfter(core->view()));
}

void MemberDriver::tellStopped(uint64_t view_number, const std::string& why) {
  status.setOver(view_number);
  client.stop(view_number);
  if (!options.on_stopped) return;
  stop_thread.post([stopped = options.on_stopped, view_number, why] { stopped(view_number, why); });
}

void MemberDriver::noteCut(const std::set<MemberPair>& pairs) {
  const auto memberOf = [this](const MemberId& id) {
    return id == core->self().id ? core->self() : network->memberOf(id);
  };
  for (const auto& [one, other] : pairs) {
    tellKeptApart(admission.couldNotConnect(memberOf(one), memberOf(other), Clock::now()),
                  "could not connect to each other");
  }
  holdBack();
}

void MemberDriver::noteBroken(const MemberId& id) {
  if (!unreachable.insert(id).second) return;  // it is told again and again
  const Member other = network->memberOf(id);
  tellKeptApart(admission.hasBroken(core->self(), other, Clock::now()),
                "have lost each other again");
  holdBack();
}

void MemberDriver::tellKeptApart(const std::string& hosts, const std::string& why) const {
  if (hosts.empty()) return;
  log(LogLevel::kWarning,
      "elastic job '" + options.job + "': members on " + hosts + " " + why +
          "; while a member runs on the one, no process on the other is taken in for " +
          formatSeconds(options.backoff) + ": look for a firewall, or a broken link");
}

void MemberDriver::holdBack() {
  std::vector<Member> members = core->view().members;
  std::erase_if(members, [&](const Member& one) { return core->losses().contains(one.id); });
  core->holdBack(admission.heldBack(members, core->newcomers(), Clock::now()));
}

// ---- the way to others

void MemberDriver::probeWays() {
  const auto now = Clock::now();
  for (const MemberId& id : ways.due(now)) {
    if (!network->knows(id)) continue;
    network->prepare(id);
    if (network->hasUnsent(id)) continue;  // no connection stands
    ways.sent(id, now);
    sendProbe(id, std::string(kProbeBytes, '\0'));
  }
  // Who has to be reached changes: one of those that are, after the other, says so.
  if (ticks % kTicksBetweenQuestions == 0 && !ways.reached().empty()) {
    const auto turn = static_cast<size_t>(ticks / kTicksBetweenQuestions) % ways.reached().size();
    sendProbe(*std::next(ways.reached().begin(), static_cast<std::ptrdiff_t>(turn)), {});
  }
  const std::vector<MemberId> unreached = ways.unreached();
  if (told_unreached || unreached.empty() || now - began < WayProbes::kTellAfter) return;
  told_unreached = true;
  log(LogLevel::kWarning, "elastic job '" + options.job + "': not taken in yet: no " +
                              std::to_string(kProbeBytes) + " bytes get through to " +
                              status.nameOf(unreached.front()) + " and back");
}

void MemberDriver::sendProbe(const MemberId& to, const std::string& padding) {
  ElasticMessage probe;
  probe.kind = ElasticKind::kProbe;
  probe.padding = padding;
  FrameHeader header;
  header.type = FrameType::kElastic;
  network->send(to, header, encodeElasticMessage(probe));
}

void MemberDriver::onProbe(const MemberId& from, const ElasticMessage& probe) {
  ElasticMessage answer;
  answer.kind = ElasticKind::kProbed;
  answer.padding = probe.padding;
  if (core->state() != ElasticCore::State::kLeftOut) {
    answer.members = core->view().members;
    for (Member& other : core->newcomers()) answer.members.push_back(std::move(other));
  }
  FrameHeader header;
  header.type = FrameType::kElastic;
  network->send(from, header, encodeElasticMessage(answer));
}

// What a process says that is no member itself, such as another newcomer, is not about whom to
// reach.
void MemberDriver::onProbed(const MemberId& from, const ElasticMessage& answer) {
  if (core->state() != ElasticCore::State::kJoining) return;
  std::set<MemberId> targets;
  for (const Member& member : answer.members) {
    if (member.id == core->self().id) continue;
    network->introduce(member);
    targets.insert(member.id);
  }
  if (targets.contains(from)) ways.setTargets(std::move(targets));
  if (answer.padding.size() == kProbeBytes && ways.answered(from)) {
    core->setReached(ways.reached());
  }
  if (ways.unreached().empty()) carryOut(core->retry());
}

void MemberDriver::loseWay(const MemberId& id) {
  if (core && ways.lose(id)) core->setReached(ways.reached());
}

void MemberDriver::onNewView() {
  const View& now = core->view();
  sole_holders.beginView();
  std::erase_if(unreachable,
                [all = core->everybody()](const MemberId& id) { return !all.contains(id); });
  if (now.has(core->self().id)) network->enterView(now);
  for (const Member& member : now.members) network->introduce(member);
  server.begin(now);
  status.begin(*core);
  client.begin(now);
  network->keepOnly(known());
  before = core->everybody();
  refused.clear();
  stays_undecided = false;
  // Connections that agreements will want.
  for (const Member& member : now.members) network->prepare(member.id);
  holdBack();
  if (place) tellClients();
  if (!now.members.empty() && now.members.front().id == core->self().id) publish();
}

// Who comes to this process's address is shown the way to the members, also by one that is left
// out: it does not hear of later views.
void MemberDriver::tellClients() {
  const bool is_member = core->state() != ElasticCore::State::kLeftOut;
  std::vector<Member> contacts = core->view().members;
  // While this one lives nobody concludes from its old word that the whole job has ended.
  if (!is_member) contacts.push_back(core->self());
  place->put("contacts", encodeMembers(contacts));
  place->put("founding", encodeFounding(founding));
  place->setStanding(
      {is_member ? Standing::Part::kMember : Standing::Part::kLeftOut, core->view().number});
}

// Is there a member that may still wait for this one's word?
bool MemberDriver::isNeeded() const {
  using State = ElasticCore::State;
  if (!core || core->state() == State::kJoining) return false;
  if (core->state() == State::kStopped) return true;
  const View& view = core->view();
  return std::any_of(view.members.begin(), view.members.end(), [&](const Member& member) {
    if (member.id == core->self().id || gone_soon.contains(member.id) ||
        core->losses().contains(member.id)) {
      return false;
    }
    // To a newcomer it may be the only one that hands the view over.
    const bool is_told = member.since < view.number || !network->hasUnsent(member.id);
    return core->state() == State::kActive || !is_told;
  });
}

// Whom messages may still go to.
std::set<MemberId> MemberDriver::known() const {
  std::set<MemberId> ids = core->everybody();
  ids.insert(before.begin(), before.end());
  return ids;
}

// Where newcomers find the job; not waited for.
void MemberDriver::publish() {
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
void MemberDriver::restoreStore() {
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
    alive->loop.post([raw = alive.get(), lineage, identity] {
      raw->restoring = false;
      raw->looks_spared = identity ? 0 : kLooksSpared;
      if (raw->core) raw->core->setWitness(lineage, identity.value_or(WitnessId()));
    });
  });
}

// The members that this newcomer knows of may have been replaced meanwhile, or the job has ended.
void MemberDriver::lookForContacts() {
  meeting().post([self = weak_from_this(), founding = founding](JobStore& job) {
    std::vector<Member> members;
    std::optional<JobEnd> end;
    try {
      members = job.contacts();
      end = job.end(founding);
    } catch (const StoreError&) {
      return;  // the next look may succeed
    }
    const auto alive = self.lock();
    if (!alive) return;
    alive->loop.post([raw = alive.get(), members, end] {
      if (raw->core) raw->hearContacts(members, end);
    });
  });
}

void MemberDriver::hearContacts(const std::vector<Member>& members,
                                const std::optional<JobEnd>& end) {
  if (end && core->state() == ElasticCore::State::kJoining) return status.setJobOver(*end);
  for (const Member& member : members) network->introduce(member);
  const std::vector<MemberId> ids = idsOf(members);
  const bool are_new = !ids.empty() && core->setContacts(ids);
  if (are_new) ways.setTargets({ids.begin(), ids.end()});
  const bool alone = !ids.empty() && !are_new && core->hasNoContactLeft();
  looks_without_members = alone ? looks_without_members + 1 : 0;
  if (looks_without_members >= 2)
    status.setContactsGone(members);  // before, others may be taking over
}

void MemberDriver::askWitness(const WitnessRequest& request) {
  if (witness_busy) return;  // it is repeated
  witness_busy = true;
  store.post([self = weak_from_this(), request, asked_at = Clock::now()](JobStore& job) {
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
    alive->loop.post([raw = alive.get(), reply, trouble, asked_at] {
      raw->hearWitness(reply, trouble, asked_at);
    });
  });
}

void MemberDriver::hearWitness(const WitnessReply& reply, const std::string& trouble,
                               Clock::time_point asked_at) {
  witness_busy = false;
  if (!core) return;
  if (reply.number > core->view().number) status.setStoreTrouble(trouble);
  const ElasticEffects effects = core->witnessAnswered(reply);
  if (!effects.refused.empty()) logRefused("the store", effects.refused);
  stays_undecided = asked_at - last_end >= kOnItsWay;
  carryOut(effects);
}

// What the store has said before does not count any more.
void MemberDriver::noteEnd() {
  last_end = Clock::now();
  stays_undecided = false;
}

void MemberDriver::onMessage(const MemberId& from, const FrameHeader& header,
                             const std::string& payload) {
  if (!core) return;
  sole_holders.forget(from);
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

void MemberDriver::onElastic(const MemberId& from, const std::string& payload) {
  const auto message = decodeElasticMessage(payload);
  if (!message) return;
  if (message->kind == ElasticKind::kProbe) return onProbe(from, *message);
  if (message->kind == ElasticKind::kProbed) return onProbed(from, *message);
  if (message->kind == ElasticKind::kJoin) {
    const std::string why = objectionToNewcomer(message->members.front(), network->memberOf(from));
    if (!why.empty()) return logRefused(status.nameOf(from), why);
  }
  const auto isGone = [&] {
    const auto loss = core->losses().find(from);
    return loss != core->losses().end() && isFinal(loss->second);
  };
  const bool was_gone = isGone();
  const ElasticEffects effects = core->receive(from, *message);
  if (!effects.refused.empty()) logRefused(status.nameOf(from), effects.refused);
  if (message->kind == ElasticKind::kJoin) {
    admission.hasReached(from, message->reached);
    holdBack();
  }
  // By its own word: it lives and will not come, which nobody else tells.
  if (!was_gone && isGone()) {
    noteEnd();
    stopForming(from, endOf(from, core->losses().at(from)));
  }
  carryOut(effects);
}

// Once for each view: whoever says it may say it again.
void MemberDriver::logRefused(const std::string& whose, const std::string& why) {
  if (!refused.insert(whose).second) return;
  log(LogLevel::kWarning,
      "elastic job '" + options.job + "': not believed of " + whose + ": " + why);
}

void MemberDriver::onLost(const MemberId& id, Loss loss, const std::string& how) {
  if (!core) return;
  client.onLost(id);
  loseWay(id);
  if (loss == Loss::kUnreachable) noteBroken(id);
  if (isFinal(loss)) noteEnd();
  stopForming(id, isFinal(loss) ? endOf(id, loss) : how);
  lose(id, loss);
}

void MemberDriver::lose(const MemberId& id, Loss loss) {
  using Verdict = SoleHolders::Verdict;
  const auto known = core->losses().find(id);
  const bool is_final = isFinal(loss) || (known != core->losses().end() && isFinal(known->second));
  if (is_final) sole_holders.forget(id);
  if (!is_final && loss == Loss::kFrozen) {
    const Verdict verdict = sole_holders.onFrozen(id, Clock::now());
    if (verdict == Verdict::kBegins) {
      log(LogLevel::kWarning, "elastic job '" + options.job + "': " + status.nameOf(id) +
                                  " does not answer, and may hold the only copy of a shard: "
                                  "it is waited for, at most " +
                                  formatSeconds(sole_holders.patience()));
    }
    if (verdict != Verdict::kLost) return;
  }
  carryOut(core->lose(id, loss));
}

void MemberDriver::watchForming(bool now) {
  forming = now;
  if (!forming || !core) return;
  for (const auto& [id, loss] : core->losses()) {
    if (loss == Loss::kParted) stopForming(id, endOf(id, loss));
  }
}

std::string MemberDriver::endOf(const MemberId& id, Loss loss) const {
  return gone_soon.contains(id) && loss != Loss::kParted ? "it has left" : wordFor(loss);
}

void MemberDriver::stopForming(const MemberId& lost, const std::string& how) {
  if (!forming || !core->view().has(lost)) return;
  tellStopped(core->view().number, "member " + status.nameOf(lost) + ": " + how);
}

// ---- the view's store

void MemberDriver::onCall(const MemberId& from, uint64_t number, const std::string& payload) {
  auto call = decodeStoreCall(payload);
  if (!call) {
    replyTo(from, number, {StoreAnswer::Status::kOver, {}, 0});
  } else if (call->view > core->view().number || core->view().has(from)) {
    server.onCall(from, number, *std::move(call));
  }
}

void MemberDriver::sendCall(const MemberId& host, uint64_t number, const StoreCall& call) {
  if (host == core->self().id) {
    server.onCall(host, number, call);
    return;
  }
  FrameHeader header;
  header.type = FrameType::kCall;
  header.seq = number;
  network->send(host, header, encodeStoreCall(call));
}

void MemberDriver::replyTo(const MemberId& to, uint64_t number, const StoreAnswer& answer) {
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
bool MemberDriver::untilOnLoop(const std::function<bool()>& done, Deadline deadline) {
  const auto found = std::make_shared<bool>(false);
  const auto look = [done, found] { *found = done(); };
  while (loop.runOnLoop(look, deadline)) {
    if (*found || deadline.expired()) return *found;
    std::this_thread::sleep_for(kBetweenLooks);
  }
  return false;
}

void MemberDriver::stop() {
  loop.runOnLoop(
      [this] {
        ending = true;
        loop.cancel(timer);
        client.end();
        place.reset();
        inquiries.reset();
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

}  // namespace torchft_ext

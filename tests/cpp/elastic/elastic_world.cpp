#include "cpp/elastic/elastic_world.h"

#include <algorithm>
#include <utility>

#include "cpp/elastic/elastic_world_rest.h"
#include "elastic/view_check.h"
#include "net/frame.h"

namespace torchft_ext {

namespace {

View firstView(const ElasticWorldOptions& options) {
  View view;
  view.lineage.bytes[0] = 1;
  view.number = 1;
  for (int i = 0; i < options.members; ++i) {
    view.members.push_back({idOfMember(i), 1, {}});
    view.voters.push_back(idOfMember(i));
  }
  if (options.witness) view.witness = ElasticWorldStore(options.parts).identityTo(1);
  if (options.secrets) {
    ViewSecret secret;
    secret.bytes[0] = 1;
    setSecret(view, secret);
  }
  return view;
}

}  // namespace

ElasticWorld::ElasticWorld(const ElasticWorldOptions& options)
    : options_(options), left_(options), store_(options.parts), history_(firstView(options)) {
  const View view = firstView(options);
  const ElasticRules rules{options.store_rule, options.min_size, 1 << 16, options.parts};
  const std::vector<MemberId> contacts = idsOf(view.members);
  for (int i = 0; i < options.members; ++i) {
    cores_.emplace_back(view.members[static_cast<size_t>(i)], rules, view);
  }
  for (int i = 0; i < options.newcomers; ++i) {
    cores_.emplace_back(Member{idOfMember(options.members + i), 0, {}}, rules, contacts);
  }
  for (int i = 0; options.secrets && i < size(); ++i) {
    ViewSecret seed;
    seed.bytes[0] = static_cast<uint8_t>(i + 2);
    cores_[static_cast<size_t>(i)].setSeed(seed);
  }
  dead_.assign(cores_.size(), false);
  asked_.assign(cores_.size(), 0);
  pending_.assign(cores_.size(), false);
  asking_.resize(cores_.size());
  seen_identity_.assign(cores_.size(), 1);
  for (int i = 0; i < size(); ++i) {
    for (int j = 0; j < size(); ++j) {
      if (isCut(i, j)) undetected_.insert({i, j});
    }
  }
  for (int i = options.members; i < size(); ++i) {
    cores_[static_cast<size_t>(i)].setReady(true);
    carryOut(i, cores_[static_cast<size_t>(i)].retry());
  }
}

bool ElasticWorld::isCut(int a, int b) const {
  return options_.cut.contains({a, b}) || options_.cut.contains({b, a});
}

uint64_t ElasticWorld::newestView() const {
  return history_.newestOf(1).number;
}

bool ElasticWorld::canSeeNewStore(int i) const {
  return options_.witness && !store_.isLost() && !dead(i) && core(i).view().number > 0 &&
         seen_identity_[static_cast<size_t>(i)] != store_.identity();
}

bool ElasticWorld::canVote(int i) const {
  const ElasticCore& core = cores_[static_cast<size_t>(i)];
  return !dead(i) && core.state() == ElasticCore::State::kActive &&
         !pending_[static_cast<size_t>(i)];
}

bool ElasticWorld::mayVote(int i) const {
  return canVote(i) && asked_[static_cast<size_t>(i)] < options_.agreements &&
         core(i).view().number < static_cast<uint64_t>(options_.views);
}

bool ElasticWorld::canDetect(const Way& pair) const {
  return !dead(pair.first) && core(pair.first).state() != ElasticCore::State::kJoining;
}

bool ElasticWorld::canSuspect(int i, int j) const {
  return i != j && !dead(i) && !dead(j) && core(i).view().has(idOfMember(j)) &&
         !core(i).losses().contains(idOfMember(j));
}

bool ElasticWorld::canPart(int i) const {
  return core(i).state() == ElasticCore::State::kActive ||
         core(i).state() == ElasticCore::State::kStopped;
}

bool ElasticWorld::canHold(int i, int newcomer) const {
  return canPart(i) && newcomer >= options_.members && !dead(newcomer) &&
         !core(i).view().has(idOfMember(newcomer)) && !core(i).holdsBack(idOfMember(newcomer));
}

std::vector<ElasticAction> ElasticWorld::actions() const {
  using Kind = ElasticAction::Kind;
  std::vector<ElasticAction> all;
  for (const Way& way : links_.ascending()) {
    if (!dead(way.second)) all.push_back({Kind::kDeliver, way.first, way.second});
  }
  for (const Way& pair : undetected_) {
    if (canDetect(pair)) all.push_back({Kind::kDetect, pair.first, pair.second});
  }
  for (int i = 0; i < size(); ++i) {
    if (dead(i)) continue;
    const StoreOp& op = asking_[static_cast<size_t>(i)];
    if (op.request) all.push_back({Kind::kWitness, i, 0});
    if (op.reply) all.push_back({Kind::kReply, i, 0});
    if (mayVote(i)) {
      all.push_back({Kind::kVote, i, 1});
      if (left_.noes > 0) all.push_back({Kind::kVote, i, 0});
      if (left_.divergences > 0) {
        all.push_back({Kind::kVote, i, 2});
        all.push_back({Kind::kVote, i, 3});
      }
    }
    if (left_.deaths > 0) all.push_back({Kind::kDie, i, 0});
    if (canSeeNewStore(i)) all.push_back({Kind::kLook, i, 0});
    if (left_.partings > 0 && canPart(i)) all.push_back({Kind::kPart, i, 0});
    if (left_.leaves > 0 && canPart(i)) all.push_back({Kind::kLeave, i, 0});
    if (left_.retries > 0 && core(i).wanted()) all.push_back({Kind::kRetry, i, 0});
    if (left_.wants > 0 && core(i).state() == ElasticCore::State::kActive) {
      all.push_back({Kind::kWant, i, 0});
    }
    if (left_.recoveries > 0 && canPart(i)) all.push_back({Kind::kRecover, i, 0});
    if (left_.exclusions > 0 && canPart(i)) all.push_back({Kind::kExclude, i, 0});
    for (int j = 0; left_.suspicions > 0 && j < size(); ++j) {
      if (canSuspect(i, j)) all.push_back({Kind::kSuspect, i, j});
    }
    for (int j = options_.members; left_.holds > 0 && j < size(); ++j) {
      if (canHold(i, j)) all.push_back({Kind::kHold, i, j});
    }
  }
  if (options_.witness && left_.witness_restarts > 0) all.push_back({Kind::kRestart, 0, 0});
  if (options_.witness && left_.witness_losses > 0) all.push_back({Kind::kLoseWitness, 0, 0});
  if (left_.heals) all.push_back({Kind::kHeal, 0, 0});
  return all;
}

std::optional<ElasticAction> ElasticWorld::draw(std::mt19937_64& random) const {
  constexpr int kTries = 100;
  constexpr uint64_t kStepsForAFault = 30;
  for (int tries = 0; tries < kTries; ++tries) {
    const bool fault = random() % kStepsForAFault == 0;
    if (const auto found = fault ? drawFault(random) : drawStep(random)) return found;
  }
  return std::nullopt;
}

std::optional<ElasticAction> ElasticWorld::drawFault(std::mt19937_64& random) const {
  using Kind = ElasticAction::Kind;
  const int a = static_cast<int>(random() % cores_.size());
  const int b = static_cast<int>(random() % cores_.size());
  const auto only = [](bool possible, const ElasticAction& action) {
    return possible ? std::optional(action) : std::nullopt;
  };
  if (dead(a)) return std::nullopt;
  if (left_.holds > 0 && random() % 4 == 0) return only(canHold(a, b), {Kind::kHold, a, b});
  if (left_.leaves > 0 && random() % 4 == 0) return only(canPart(a), {Kind::kLeave, a, 0});
  if (left_.recoveries + left_.exclusions > 0 && random() % 2 == 0) {
    if (!canPart(a)) return std::nullopt;
    if (random() % 2 == 0) return only(left_.recoveries > 0, {Kind::kRecover, a, 0});
    return only(left_.exclusions > 0, {Kind::kExclude, a, 0});
  }
  if (left_.breaks > 0 && random() % 2 == 0 && !links_.busy().empty()) {
    const Way& way = links_.busy()[random() % links_.busy().size()];
    const Kind kind = random() % 2 == 0 ? Kind::kBreak : Kind::kEnd;
    return only(!dead(way.first), {kind, way.first, way.second});
  }
  switch (random() % 8) {
    case 0:
      return only(left_.deaths > 0, {Kind::kDie, a, 0});
    case 1:
      return only(left_.suspicions > 0 && canSuspect(a, b), {Kind::kSuspect, a, b});
    case 2:
      return only(left_.wants > 0 && core(a).state() == ElasticCore::State::kActive,
                  {Kind::kWant, a, 0});
    case 3:
      return only(options_.witness && left_.witness_restarts > 0, {Kind::kRestart, 0, 0});
    case 4:
      return only(options_.witness && left_.witness_losses > 0, {Kind::kLoseWitness, 0, 0});
    case 5:
      return only(left_.heals, {Kind::kHeal, 0, 0});
    case 6:
      return only(left_.partings > 0 && canPart(a), {Kind::kPart, a, 0});
    default:
      return only(left_.retries > 0 && core(a).wanted(), {Kind::kRetry, a, 0});
  }
}

// Of the links that carry something, the losses that are to be noticed, and the members.
std::optional<ElasticAction> ElasticWorld::drawStep(std::mt19937_64& random) const {
  using Kind = ElasticAction::Kind;
  size_t at = random() % (links_.busy().size() + undetected_.size() + cores_.size());
  if (at < links_.busy().size())
    return ElasticAction{Kind::kDeliver, links_.busy()[at].first, links_.busy()[at].second};
  at -= links_.busy().size();
  if (at < undetected_.size()) {
    // One that is near: they are in no order that matters.
    const Way from{static_cast<int>(random() % cores_.size()),
                   static_cast<int>(random() % cores_.size())};
    auto pair = undetected_.lower_bound(from);
    if (pair == undetected_.end()) pair = undetected_.begin();
    if (!canDetect(*pair)) return std::nullopt;
    return ElasticAction{Kind::kDetect, pair->first, pair->second};
  }
  const int i = static_cast<int>(at - undetected_.size());
  if (dead(i)) return std::nullopt;
  const StoreOp& op = asking_[static_cast<size_t>(i)];
  if (op.reply) return ElasticAction{Kind::kReply, i, 0};
  if (op.request) return ElasticAction{Kind::kWitness, i, 0};
  if (canSeeNewStore(i) && random() % 2 == 0) return ElasticAction{Kind::kLook, i, 0};
  if (!mayVote(i)) return std::nullopt;
  if (left_.divergences > 0 && random() % cores_.size() == 0) {
    return ElasticAction{Kind::kVote, i, random() % 2 == 0 ? 2 : 3};
  }
  const bool no = left_.noes > 0 && random() % cores_.size() == 0;
  return ElasticAction{Kind::kVote, i, no ? 0 : 1};
}

void ElasticWorld::endConnections(int of) {
  for (int i = 0; i < size(); ++i) {
    undetected_.erase({of, i});
    links_.drop({i, of});
    if (i != of && !dead(i)) undetected_.insert({i, of});
  }
}

// Each direction has a connection of its own. One of its ends sees that it ends; another one stands
// at once.
void ElasticWorld::breakConnection(int from, int to, bool sender_sees) {
  links_.drop({from, to});
  if (sender_sees) {
    carryOut(from, cores_[static_cast<size_t>(from)].connected(idOfMember(to)));
  } else if (!dead(to)) {
    carryOut(to, cores_[static_cast<size_t>(to)].disconnected(idOfMember(from)));
  }
}

void ElasticWorld::deliver(int from, int to) {
  const auto message = links_.takeFirst({from, to});
  ElasticCore& receiver = cores_[static_cast<size_t>(to)];
  const auto hasParted = [&] {
    const auto loss = receiver.losses().find(idOfMember(from));
    return loss != receiver.losses().end() && loss->second == Loss::kParted;
  };
  const bool had_parted = hasParted();
  carryOut(to, receiver.receive(idOfMember(from), *message));
  // Its group has failed, as below.
  if (!had_parted && hasParted()) carryOut(to, receiver.want(receiver.view().number));
}

void ElasticWorld::detect(int i, int gone) {
  ElasticCore& member = cores_[static_cast<size_t>(i)];
  undetected_.erase({i, gone});
  links_.drop({gone, i});  // the rest is lost
  carryOut(i, member.lose(idOfMember(gone), dead(gone) ? Loss::kDead : Loss::kUnreachable));
  // Its group has failed: the user awaits another view.
  if (member.view().has(idOfMember(gone)) && (dead(gone) || !options_.groups_stand)) {
    carryOut(i, member.want(member.view().number));
  }
}

void ElasticWorld::part(int i) {
  const auto at = static_cast<size_t>(i);
  --left_.partings;
  if (core(i).accepted()) accepted_by_parted_.push_back(core(i).accepted()->view);
  Lineage lineage;
  lineage.bytes[0] = static_cast<uint8_t>(i + 2);
  pending_[at] = false;
  seen_identity_[at] = 0;
  carryOut(i, cores_[at].beginLineage(lineage));
}

void ElasticWorld::heal() {
  left_.heals = false;
  options_.cut.clear();
  // Who had not noticed yet has lost its connections all the same.
  for (const auto& [who, gone] : undetected_) {
    if (!dead(gone)) carryOut(who, cores_[static_cast<size_t>(who)].want(core(who).view().number));
  }
  std::erase_if(undetected_, [&](const auto& pair) { return !dead(pair.second); });
  for (int i = 0; i < size(); ++i) {
    for (int j = 0; j < size(); ++j) {
      if (i == j || dead(i) || dead(j)) continue;
      carryOut(i, cores_[static_cast<size_t>(i)].connected(idOfMember(j)));
    }
  }
}

void ElasticWorld::take(const ElasticAction& action) {
  using Kind = ElasticAction::Kind;
  const auto a = static_cast<size_t>(action.a);
  switch (action.kind) {
    case Kind::kDeliver:
      deliver(action.a, action.b);
      break;
    case Kind::kVote:
      if (action.b == 0) --left_.noes;
      if (action.b > 1) --left_.divergences;
      vote(action.a, action.b);
      break;
    case Kind::kDie:
      --left_.deaths;
      dead_[a] = true;
      asking_[a].reply.reset();  // a request may still reach the store
      endConnections(action.a);
      break;
    case Kind::kDetect:
      detect(action.a, action.b);
      break;
    case Kind::kSuspect:
      --left_.suspicions;
      carryOut(action.a, cores_[a].lose(idOfMember(action.b), Loss::kFrozen));
      if (!options_.groups_stand) {
        carryOut(action.a, cores_[a].want(core(action.a).view().number));
      }
      break;
    case Kind::kRetry:
      --left_.retries;
      carryOut(action.a, cores_[a].retry());
      break;
    case Kind::kWant:
      --left_.wants;
      carryOut(action.a, cores_[a].want(core(action.a).view().number));
      break;
    case Kind::kWitness:
      asking_[a].reply = store_.answer(*asking_[a].request);
      asking_[a].request.reset();
      break;
    case Kind::kReply: {
      const WitnessReply reply = std::move(*asking_[a].reply);
      asking_[a].reply.reset();
      carryOut(action.a, cores_[a].witnessAnswered(reply));
      break;
    }
    case Kind::kRestart:
      --left_.witness_restarts;
      store_.restart();
      break;
    case Kind::kLoseWitness:
      --left_.witness_losses;
      store_.lose();
      break;
    case Kind::kLook:
      seen_identity_[a] = store_.identity();
      cores_[a].setWitness(core(action.a).view().lineage, store_.identityTo(lineageOf(action.a)));
      break;
    case Kind::kBreak:
    case Kind::kEnd:
      --left_.breaks;
      breakConnection(action.a, action.b, action.kind == Kind::kBreak);
      break;
    case Kind::kLeave:
      --left_.leaves;
      cores_[a].setLeaving();
      carryOut(action.a, cores_[a].want(core(action.a).view().number));
      break;
    case Kind::kPart:
      part(action.a);
      break;
    case Kind::kRecover:
      --left_.recoveries;
      recover(action.a, {});
      break;
    case Kind::kExclude: {
      --left_.exclusions;
      const std::vector<MemberId> all = idsOf(core(action.a).view().members);
      recover(action.a, {all.begin(), all.end()});
      break;
    }
    case Kind::kHold:
      --left_.holds;
      cores_[a].holdBack({idOfMember(action.b)});
      break;
    case Kind::kHeal:
      heal();
      break;
  }
  history_.check();
}

void ElasticWorld::vote(int i, int how) {
  const auto at = static_cast<size_t>(i);
  const View& view = core(i).view();
  ++asked_[at];
  pending_[at] = true;
  const ElasticWorldHistory::ViewKey key = ElasticWorldHistory::keyOf(view);
  const auto index = static_cast<uint64_t>(asked_[at]);
  Vote vote;
  vote.ok = how != 0;
  if (!vote.ok) history_.sayNo(i, key, index);
  if (options_.digests) {
    vote.digest = {how == 2 ? "other" : "same", static_cast<uint32_t>(i % 2),
                   how == 3 ? "other" : "same"};
    history_.sayDigest(i, key, index, vote.digest);
  }
  carryOut(i, cores_[at].agree(view.number, std::move(vote)));
}

void ElasticWorld::recover(int i, const std::set<MemberId>& absent) {
  ElasticCore& member = cores_[static_cast<size_t>(i)];
  member.setReady(true);
  member.leaveOut(absent);
  carryOut(i, member.want(member.view().number));
}

void ElasticWorld::carryOut(int i, ElasticEffects effects) {
  const auto at = static_cast<size_t>(i);
  for (auto& [to, message] : effects.sends) {
    const int j = indexOfMember(to);
    if (j < 0 || j >= size() || dead(j) || isCut(i, j)) continue;
    links_.send({i, j}, std::move(message));
  }
  if (effects.left_out && core(i).isIsolated()) endConnections(i);
  if (effects.witness) asking_[at].request = std::move(effects.witness);
  if (effects.new_view) {
    asked_[at] = 0;
    cores_[at].setReady(false);  // its user goes back to work
    checkView(i);
  }
  for (const Outcome& outcome : effects.answers) {
    pending_[at] = false;
    checkAnswer(i, outcome);
    // As users do.
    if (outcome.answer.new_witness && !dead(i) && outcome.view == core(i).view().number) {
      carryOut(i, cores_[at].want(outcome.view));
    }
  }
}

void ElasticWorld::checkView(int i) {
  const View& view = core(i).view();
  const LineageNumber lineage = numberOf(view.lineage);
  const bool was_asked_for = i >= options_.members;  // by a newcomer
  if (lineage != 1 && lineage != i + 2 && !was_asked_for) {
    history_.fail("member " + std::to_string(i) + " is in another's lineage");
  }
  if (options_.exclusions > 0 && hasNoOtherLosses()) history_.checkLeftOut(view);
  history_.adopt(view);
}

// Members are missing in a view because others called them absent, and for nothing else.
bool ElasticWorld::hasNoOtherLosses() const {
  return options_.deaths + options_.suspicions + options_.partings + options_.leaves == 0 &&
         options_.cut.empty() && !options_.heals;
}

void ElasticWorld::checkAnswer(int i, const Outcome& outcome) {
  if (core(i).state() == ElasticCore::State::kLeftOut || dead(i)) return;  // it raises
  history_.returnFrom(i, lineageOf(i), outcome);
}

// ---- without faults

bool ElasticWorld::mustSettle() const {
  return ElasticWorldRest(*this).isDue();
}

// What goes on by itself.
std::optional<ElasticAction> ElasticWorld::nextQuietly() const {
  using Kind = ElasticAction::Kind;
  if (!links_.busy().empty()) {
    const Way& way = links_.first();
    return ElasticAction{Kind::kDeliver, way.first, way.second};
  }
  for (const Way& pair : undetected_) {
    if (canDetect(pair)) return ElasticAction{Kind::kDetect, pair.first, pair.second};
  }
  for (int i = 0; i < size(); ++i) {
    if (dead(i)) continue;
    const StoreOp& op = asking_[static_cast<size_t>(i)];
    if (op.request) return ElasticAction{Kind::kWitness, i, 0};
    if (op.reply) return ElasticAction{Kind::kReply, i, 0};
    if (canSeeNewStore(i)) return ElasticAction{Kind::kLook, i, 0};
  }
  return std::nullopt;
}

// False: nothing happened.
bool ElasticWorld::runQuietly() {
  constexpr int kMostSteps = 1000000;
  for (int step = 0; step < kMostSteps && history_.wrong().empty(); ++step) {
    const auto next = nextQuietly();
    if (!next) return step > 0;
    take(*next);
  }
  history_.fail("messages without end");
  return true;
}

std::string ElasticWorld::settle() {
  left_.retries = left_.deaths = left_.suspicions = left_.wants = left_.noes = 0;
  left_.divergences = 0;
  left_.witness_restarts = left_.witness_losses = left_.partings = left_.leaves = left_.breaks = 0;
  left_.heals = false;
  left_.recoveries = left_.exclusions = left_.holds = 0;
  for (ElasticCore& core : cores_) core.holdBack({});
  for (int round = 0; round < 40 && history_.wrong().empty(); ++round) {
    runQuietly();
    if (!history_.wrong().empty()) return history_.wrong();
    if (ElasticWorldRest(*this).isThere()) return {};
    for (int i = 0; i < size(); ++i) {
      if (dead(i)) continue;
      if (core(i).state() == ElasticCore::State::kStopped) {  // its group has failed
        carryOut(i, cores_[static_cast<size_t>(i)].want(core(i).view().number));
      }
      carryOut(i, cores_[static_cast<size_t>(i)].retry());
      carryOut(i, cores_[static_cast<size_t>(i)].askAgain());
    }
    runQuietly();
    // Users whose members wait for them come to the agreement too.
    bool waited_for = false;
    for (int i = 0; i < size(); ++i) waited_for |= !dead(i) && pending_[static_cast<size_t>(i)];
    for (int i = 0; waited_for && i < size(); ++i) {
      if (canVote(i) && asked_[static_cast<size_t>(i)] < options_.agreements + 3) vote(i, 1);
    }
  }
  if (!history_.wrong().empty()) return history_.wrong();
  return ElasticWorldRest(*this).isThere() ? "" : "it does not come to an end" + describeMembers();
}

std::string ElasticWorld::describeMembers() const {
  std::string text;
  for (int i = 0; i < size(); ++i) {
    if (dead(i)) continue;
    text += "; member " + std::to_string(i) + " in state " +
            std::to_string(static_cast<int>(core(i).state())) + " of view " +
            std::to_string(core(i).view().number) + " of";
    for (const Member& member : core(i).view().members) {
      text += " " + std::to_string(indexOfMember(member.id));
    }
    if (pending_[static_cast<size_t>(i)]) text += ", in an agreement";
  }
  return text;
}

std::string ElasticWorld::fingerprint() const {
  ByteWriter writer;
  for (int i = 0; i < size(); ++i) {
    const auto at = static_cast<size_t>(i);
    writer.u8(static_cast<uint8_t>((dead(i) ? 1 : 0) | (pending_[at] ? 2 : 0)));
    writer.u8(static_cast<uint8_t>(asked_[at]));
    if (!dead(i)) writer.text(core(i).fingerprint());
    const StoreOp& op = asking_[at];
    writer.u8(static_cast<uint8_t>((op.request ? 1 + static_cast<int>(op.request->what) : 0) |
                                   (op.reply ? 8 + static_cast<int>(op.reply->what) * 16 : 0)));
    if (op.request) {
      writer.u64(op.request->number);
      writer.u8(op.request->identity.bytes[0]);
      writer.text(encodeAccepted(op.request->expected ? *op.request->expected : AcceptedView{}));
      writer.u32(op.request->ballot.round);
      if (op.request->view) writer.text(encodeView(*op.request->view));
    }
    if (op.reply) {
      writer.u32(op.reply->ballot.round);
      writer.u64(op.reply->number);
      writer.u8(static_cast<uint8_t>((op.reply->has_vote ? 1 : 0) | (op.reply->claimed ? 2 : 0)));
      writer.text(encodeAccepted(op.reply->held ? *op.reply->held : AcceptedView{}));
      if (op.reply->decided) writer.text(encodeView(*op.reply->decided));
      if (op.reply->later) writer.text(encodeView(*op.reply->later));
    }
  }
  links_.write(writer);
  for (const auto& [who, gone] : undetected_) {
    writer.u8(static_cast<uint8_t>(who));
    writer.u8(static_cast<uint8_t>(gone));
  }
  for (const auto& [lineage, held] : store_.held()) writer.text(encodeAccepted(held));
  for (const int left :
       {left_.deaths, left_.suspicions, left_.noes, left_.retries, left_.wants,
        left_.witness_restarts, left_.witness_losses, left_.heals ? 1 : 0,
        static_cast<int>(store_.identity()), store_.isLost() ? 1 : 0, left_.partings, left_.leaves,
        left_.breaks, left_.divergences, left_.recoveries, left_.exclusions, left_.holds}) {
    writer.u8(static_cast<uint8_t>(left));
  }
  for (const View& view : accepted_by_parted_) writer.text(encodeView(view));
  for (const uint8_t seen : seen_identity_) writer.u8(seen);
  history_.write(writer);
  return writer.take();
}

std::string ElasticWorld::describe(const ElasticAction& action) {
  static const std::array<const char*, 20> kNames = {
      "deliver", "vote",  "die",     "detect",       "suspect", "retry", "want",
      "witness", "reply", "restart", "lose witness", "heal",    "look",  "part",
      "leave",   "break", "end",     "recover",      "exclude", "hold"};
  return std::string(kNames[static_cast<size_t>(action.kind)]) + " " + std::to_string(action.a) +
         " " + std::to_string(action.b);
}

}  // namespace torchft_ext

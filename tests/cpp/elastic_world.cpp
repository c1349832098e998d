#include "elastic_world.h"

#include <algorithm>
#include <utility>

#include "elastic/view_check.h"
#include "elastic_world_members.h"
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
  if (options.witness) view.witness.bytes[0] = 1;
  if (options.secrets) {
    ViewSecret secret;
    secret.bytes[0] = 1;
    setSecret(view, secret);
  }
  return view;
}

}  // namespace

ElasticWorld::ElasticWorld(const ElasticWorldOptions& options)
    : options_(options),
      left_(options),
      store_(options.store_rule, options.parts),
      history_(firstView(options)) {
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

bool ElasticWorld::gone(int i) const {
  return dead(i) || (core(i).view().number > 0 && core(i).view().lineage.bytes[0] != 1);
}

bool ElasticWorld::canSeeNewStore(int i) const {
  return options_.witness && !store_.lost() && !gone(i) &&
         seen_identity_[static_cast<size_t>(i)] != store_.identity();
}

bool ElasticWorld::canVote(int i) const {
  const ElasticCore& core = cores_[static_cast<size_t>(i)];
  return !gone(i) && core.state() == ElasticCore::State::kActive &&
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

std::vector<ElasticAction> ElasticWorld::actions() const {
  using Kind = ElasticAction::Kind;
  std::vector<ElasticAction> all;
  for (const Way& way : links_.ascending()) {
    if (dead(way.second)) continue;
    all.push_back({Kind::kDeliver, way.first, way.second});
    if (left_.breaks > 0) all.push_back({Kind::kBreak, way.first, way.second});
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
    }
    if (left_.deaths > 0) all.push_back({Kind::kDie, i, 0});
    if (canSeeNewStore(i)) all.push_back({Kind::kLook, i, 0});
    if (left_.partings > 0 && canPart(i)) all.push_back({Kind::kPart, i, 0});
    if (left_.leaves > 0 && canPart(i)) all.push_back({Kind::kLeave, i, 0});
    if (left_.retries > 0 && core(i).wanted()) all.push_back({Kind::kRetry, i, 0});
    if (left_.wants > 0 && core(i).state() == ElasticCore::State::kActive) {
      all.push_back({Kind::kWant, i, 0});
    }
    for (int j = 0; left_.suspicions > 0 && j < size(); ++j) {
      if (canSuspect(i, j)) all.push_back({Kind::kSuspect, i, j});
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
  if (left_.leaves > 0 && random() % 4 == 0) return only(canPart(a), {Kind::kLeave, a, 0});
  if (left_.breaks > 0 && random() % 2 == 0 && !links_.busy().empty()) {
    const Way& way = links_.busy()[random() % links_.busy().size()];
    return only(!dead(way.first), {Kind::kBreak, way.first, way.second});
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
  const std::vector<Way>& busy = links_.busy();
  size_t at = random() % (busy.size() + undetected_.size() + cores_.size());
  if (at < busy.size()) return ElasticAction{Kind::kDeliver, busy[at].first, busy[at].second};
  at -= busy.size();
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
  const bool no = left_.noes > 0 && random() % cores_.size() == 0;
  return ElasticAction{Kind::kVote, i, no ? 0 : 1};
}

void ElasticWorld::take(const ElasticAction& action) {
  using Kind = ElasticAction::Kind;
  const auto a = static_cast<size_t>(action.a);
  switch (action.kind) {
    case Kind::kDeliver: {
      const auto message = links_.takeFirst({action.a, action.b});
      ElasticCore& receiver = cores_[static_cast<size_t>(action.b)];
      carryOut(action.b, receiver.receive(idOfMember(action.a), *message));
      // Its group has failed, as below.
      if (message->kind == ElasticKind::kParted && !gone(action.b)) {
        carryOut(action.b, receiver.want(receiver.view().number));
      }
      break;
    }
    case Kind::kVote:
      if (action.b == 0) --left_.noes;
      vote(action.a, action.b != 0);
      break;
    case Kind::kDie:
      --left_.deaths;
      dead_[a] = true;
      asking_[a].reply.reset();  // a request may still reach the store
      for (int i = 0; i < size(); ++i) {
        undetected_.erase({action.a, i});
        links_.drop({i, action.a});
        if (i != action.a && !dead(i)) undetected_.insert({i, action.a});
      }
      break;
    case Kind::kDetect: {
      undetected_.erase({action.a, action.b});
      links_.drop({action.b, action.a});  // the rest is lost
      carryOut(action.a, cores_[a].lose(idOfMember(action.b),
                                        dead(action.b) ? Loss::kDead : Loss::kUnreachable));
      // Its group has failed: the user awaits another view.
      if (core(action.a).view().has(idOfMember(action.b)) &&
          (dead(action.b) || !options_.groups_stand)) {
        carryOut(action.a, cores_[a].want(core(action.a).view().number));
      }
      break;
    }
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
    case Kind::kLook: {
      WitnessId identity;
      identity.bytes[0] = seen_identity_[a] = store_.identity();
      cores_[a].setWitness(identity);
      break;
    }
    case Kind::kLeave:
      --left_.leaves;
      cores_[a].setLeaving();
      carryOut(action.a, cores_[a].want(core(action.a).view().number));
      break;
    case Kind::kPart: {
      --left_.partings;
      if (core(action.a).accepted()) accepted_by_parted_.push_back(core(action.a).accepted()->view);
      Lineage lineage;
      lineage.bytes[0] = static_cast<uint8_t>(action.a + 2);
      pending_[a] = false;
      carryOut(action.a, cores_[a].beginLineage(lineage));
      break;
    }
    case Kind::kBreak:
      --left_.breaks;
      links_.drop({action.a, action.b});
      carryOut(action.a, cores_[a].connected(idOfMember(action.b)));
      break;
    case Kind::kHeal:
      left_.heals = false;
      options_.cut.clear();
      // Who had not noticed yet has lost its connections all the same.
      for (const auto& [who, gone] : undetected_) {
        if (!dead(gone))
          carryOut(who, cores_[static_cast<size_t>(who)].want(core(who).view().number));
      }
      std::erase_if(undetected_, [&](const auto& pair) { return !dead(pair.second); });
      for (int i = 0; i < size(); ++i) {
        for (int j = 0; j < size(); ++j) {
          if (i == j || dead(i) || dead(j)) continue;
          carryOut(i, cores_[static_cast<size_t>(i)].connected(idOfMember(j)));
        }
      }
      break;
  }
  history_.check();
}

void ElasticWorld::vote(int i, bool ok) {
  const auto at = static_cast<size_t>(i);
  const uint64_t number = core(i).view().number;
  ++asked_[at];
  pending_[at] = true;
  if (!ok) history_.sayNo(i, number, static_cast<uint64_t>(asked_[at]));
  Vote vote;
  vote.ok = ok;
  carryOut(i, cores_[at].agree(number, std::move(vote)));
}

void ElasticWorld::carryOut(int i, ElasticEffects effects) {
  const auto at = static_cast<size_t>(i);
  for (auto& [to, message] : effects.sends) {
    const int j = indexOfMember(to);
    if (j < 0 || j >= size() || dead(j) || isCut(i, j)) continue;
    links_.send({i, j}, std::move(message));
  }
  if (effects.witness) asking_[at].request = std::move(effects.witness);
  if (effects.new_view) {
    asked_[at] = 0;
    checkView(i);
  }
  for (const Outcome& outcome : effects.answers) {
    pending_[at] = false;
    checkAnswer(i, outcome);
    // As users do.
    if (outcome.answer.new_witness && !gone(i) && outcome.view == core(i).view().number) {
      carryOut(i, cores_[at].want(outcome.view));
    }
  }
}

void ElasticWorld::checkView(int i) {
  const View& view = core(i).view();
  const int lineage = view.lineage.bytes[0];
  if (lineage != 1) {
    const bool was_asked_for = i >= options_.members;  // by a newcomer
    if (lineage != i + 2 && !was_asked_for) {
      history_.fail("member " + std::to_string(i) + " is in another's lineage");
    }
    return;
  }
  history_.adopt(view);
}

void ElasticWorld::checkAnswer(int i, const Outcome& outcome) {
  if (core(i).state() == ElasticCore::State::kLeftOut || gone(i)) return;  // it raises
  history_.returnFrom(i, outcome);
}

// ---- without faults

bool ElasticWorld::mustSettle() const {
  if (!options_.cut.empty()) return false;
  // Of every view that was decided, or that somebody has accepted for the next one: it may have to
  // be taken up.
  std::vector<View> binding = store_.binding();
  for (const auto& [number, view] : history_.views()) binding.push_back(view);
  for (const ElasticCore& core : cores_) {
    if (core.accepted()) binding.push_back(core.accepted()->view);
  }
  binding.insert(binding.end(), accepted_by_parted_.begin(), accepted_by_parted_.end());
  // And of those whose learners may have been promoted, by what the living know.
  for (int i = 0; i < size(); ++i) {
    if (gone(i) || core(i).promotion() == Promotion::kNo) continue;
    binding.push_back(core(i).view());
    binding.back().voters = idsOf(core(i).view().members);
  }
  return std::all_of(binding.begin(), binding.end(), [&](const View& view) {
    const auto alive = static_cast<size_t>(
        std::count_if(view.voters.begin(), view.voters.end(),
                      [&](const MemberId& id) { return !gone(indexOfMember(id)); }));
    if (!options_.store_rule) return 2 * alive > view.voters.size();
    return alive >= std::min(view.voters.size(), static_cast<size_t>(options_.min_size));
  });
}

bool ElasticWorld::everyoneSettled() const {
  for (const Member& member : history_.newest().members) {
    const int i = indexOfMember(member.id);
    if (!gone(i) && core(i).state() == ElasticCore::State::kJoining) return false;  // untold
  }
  uint64_t newest = 0;
  for (int i = 0; i < size(); ++i) {
    if (!gone(i)) newest = std::max(newest, core(i).view().number);
  }
  for (int i = 0; i < size(); ++i) {
    if (gone(i) || core(i).state() == ElasticCore::State::kLeftOut) continue;
    if (core(i).state() == ElasticCore::State::kJoining) continue;
    if (core(i).state() != ElasticCore::State::kActive || core(i).view().number != newest ||
        pending_[static_cast<size_t>(i)]) {
      return false;
    }
    for (const Member& member : core(i).view().members) {
      if (gone(indexOfMember(member.id))) return false;
    }
  }
  return true;
}

// What goes on by itself.
std::optional<ElasticAction> ElasticWorld::nextQuietly() const {
  using Kind = ElasticAction::Kind;
  if (!links_.busy().empty()) {
    const Way& way = *std::min_element(links_.busy().begin(), links_.busy().end());
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
  for (int step = 0; step < kMostSteps && wrong().empty(); ++step) {
    const auto next = nextQuietly();
    if (!next) return step > 0;
    take(*next);
  }
  history_.fail("messages without end");
  return true;
}

std::string ElasticWorld::settle() {
  left_.retries = left_.deaths = left_.suspicions = left_.wants = left_.noes = 0;
  left_.witness_restarts = left_.witness_losses = left_.partings = left_.leaves = left_.breaks = 0;
  left_.heals = false;
  for (int round = 0; round < 40 && wrong().empty(); ++round) {
    runQuietly();
    if (!wrong().empty()) return wrong();
    if (everyoneSettled()) return {};
    for (int i = 0; i < size(); ++i) {
      if (dead(i)) continue;
      carryOut(i, cores_[static_cast<size_t>(i)].retry());
      carryOut(i, cores_[static_cast<size_t>(i)].askAgain());
    }
    runQuietly();
    // Users whose members wait for them come to the agreement too.
    bool waited_for = false;
    for (int i = 0; i < size(); ++i) waited_for |= !dead(i) && pending_[static_cast<size_t>(i)];
    for (int i = 0; waited_for && i < size(); ++i) {
      if (canVote(i) && asked_[static_cast<size_t>(i)] < options_.agreements + 3) vote(i, true);
    }
  }
  if (!wrong().empty()) return wrong();
  return everyoneSettled() || !mustSettle() ? "" : "it does not come to an end" + describeMembers();
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
    }
  }
  links_.write(writer);
  for (const auto& [who, gone] : undetected_) {
    writer.u8(static_cast<uint8_t>(who));
    writer.u8(static_cast<uint8_t>(gone));
  }
  store_.write(writer);
  for (const int left : {left_.deaths, left_.suspicions, left_.noes, left_.retries, left_.wants,
                         left_.witness_restarts, left_.witness_losses, left_.heals ? 1 : 0,
                         left_.partings, left_.leaves, left_.breaks}) {
    writer.u8(static_cast<uint8_t>(left));
  }
  for (const View& view : accepted_by_parted_) writer.text(encodeView(view));
  for (const uint8_t seen : seen_identity_) writer.u8(seen);
  history_.write(writer);
  return writer.take();
}

std::string ElasticWorld::describe(const ElasticAction& action) {
  static const std::array<const char*, 16> kNames = {
      "deliver", "vote",    "die",          "detect", "suspect", "retry", "want",  "witness",
      "reply",   "restart", "lose witness", "heal",   "look",    "part",  "leave", "break"};
  return std::string(kNames[static_cast<size_t>(action.kind)]) + " " + std::to_string(action.a) +
         " " + std::to_string(action.b);
}

}  // namespace torchft_ext

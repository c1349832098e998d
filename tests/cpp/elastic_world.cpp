#include "elastic_world.h"

#include <algorithm>
#include <utility>

#include "elastic/view_check.h"
#include "net/frame.h"

namespace torchft_ext {

MemberId ElasticWorld::idOf(int i) {
  MemberId id;
  id.bytes[0] = static_cast<uint8_t>((i + 1) >> 8);
  id.bytes[1] = static_cast<uint8_t>(i + 1);
  return id;
}

int ElasticWorld::indexOf(const MemberId& id) {
  return (id.bytes[0] << 8) + id.bytes[1] - 1;
}

ElasticWorld::ElasticWorld(const ElasticWorldOptions& options) : options_(options), left_(options) {
  View view;
  view.lineage.bytes[0] = 1;
  view.number = 1;
  for (int i = 0; i < options.members; ++i) {
    view.members.push_back({idOf(i), 1, {}});
    view.voters.push_back(idOf(i));
  }
  if (options.witness) view.witness = identityTo(1);
  if (options.secrets) {
    ViewSecret secret;
    secret.bytes[0] = 1;
    setSecret(view, secret);
  }
  const ElasticRules rules{options.store_rule, options.min_size, 1 << 16, options.parts};
  const std::vector<MemberId> contacts = idsOf(view.members);
  for (int i = 0; i < options.members; ++i) {
    cores_.emplace_back(view.members[static_cast<size_t>(i)], rules, view);
  }
  for (int i = 0; i < options.newcomers; ++i) {
    cores_.emplace_back(Member{idOf(options.members + i), 0, {}}, rules, contacts);
  }
  for (int i = 0; options.secrets && i < size(); ++i) {
    ViewSecret seed;
    seed.bytes[0] = static_cast<uint8_t>(i + 2);
    cores_[static_cast<size_t>(i)].setSeed(seed);
  }
  views_.emplace(keyOf(view), view).first->second.secret = {};
  dead_.assign(cores_.size(), false);
  asked_.assign(cores_.size(), 0);
  pending_.assign(cores_.size(), false);
  store_.resize(cores_.size());
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

std::set<int> ElasticWorld::lineages() const {
  std::set<LineageNumber> all{1};
  for (int i = 0; i < size(); ++i) {
    if (lineageOf(i) != 0) all.insert(lineageOf(i));
  }
  return all;
}

bool ElasticWorld::isGoneFrom(LineageNumber lineage, int i) const {
  return dead(i) || (core(i).view().number > 0 && lineageOf(i) != lineage);
}

// Another one to each lineage, as it is drawn at random.
WitnessId ElasticWorld::identityTo(LineageNumber lineage) const {
  WitnessId identity;
  identity.bytes[0] = store_identity_;
  identity.bytes[1] = static_cast<uint8_t>(lineage - 1);
  return identity;
}

uint64_t ElasticWorld::newestView() const {
  return std::prev(views_.upper_bound({1, UINT64_MAX}))->first.second;
}

bool ElasticWorld::canSeeNewStore(int i) const {
  return options_.witness && !witness_lost_ && !dead(i) && core(i).view().number > 0 &&
         seen_identity_[static_cast<size_t>(i)] != store_identity_;
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
  return i != j && !dead(i) && !dead(j) && core(i).view().has(idOf(j)) &&
         !core(i).losses().contains(idOf(j));
}

bool ElasticWorld::canPart(int i) const {
  return core(i).state() == ElasticCore::State::kActive ||
         core(i).state() == ElasticCore::State::kStopped;
}

std::vector<ElasticAction> ElasticWorld::actions() const {
  using Kind = ElasticAction::Kind;
  std::vector<ElasticAction> all;
  for (const auto& [way, link] : links_) {
    if (!dead(way.second)) all.push_back({Kind::kDeliver, way.first, way.second});
  }
  for (const Way& pair : undetected_) {
    if (canDetect(pair)) all.push_back({Kind::kDetect, pair.first, pair.second});
  }
  for (int i = 0; i < size(); ++i) {
    if (dead(i)) continue;
    const StoreOp& op = store_[static_cast<size_t>(i)];
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
  if (left_.breaks > 0 && random() % 2 == 0 && !busy_.empty()) {
    const Way& way = busy_[random() % busy_.size()];
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
  size_t at = random() % (busy_.size() + undetected_.size() + cores_.size());
  if (at < busy_.size()) return ElasticAction{Kind::kDeliver, busy_[at].first, busy_[at].second};
  at -= busy_.size();
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
  const StoreOp& op = store_[static_cast<size_t>(i)];
  if (op.reply) return ElasticAction{Kind::kReply, i, 0};
  if (op.request) return ElasticAction{Kind::kWitness, i, 0};
  if (canSeeNewStore(i) && random() % 2 == 0) return ElasticAction{Kind::kLook, i, 0};
  if (!mayVote(i)) return std::nullopt;
  const bool no = left_.noes > 0 && random() % cores_.size() == 0;
  return ElasticAction{Kind::kVote, i, no ? 0 : 1};
}

void ElasticWorld::send(const Way& way, std::shared_ptr<const ElasticMessage> message) {
  const auto [link, fresh] = links_.try_emplace(way);
  if (fresh) {
    link->second.at = busy_.size();
    busy_.push_back(way);
  }
  link->second.messages.push_back(std::move(message));
}

std::shared_ptr<const ElasticMessage> ElasticWorld::takeFirst(const Way& way) {
  auto& messages = links_.at(way).messages;
  auto message = std::move(messages.front());
  messages.erase(messages.begin());
  if (messages.empty()) drop(way);
  return message;
}

void ElasticWorld::drop(const Way& way) {
  const auto link = links_.find(way);
  if (link == links_.end()) return;
  const size_t at = link->second.at;
  links_.erase(link);
  if (at + 1 < busy_.size()) {
    busy_[at] = busy_.back();
    links_.at(busy_[at]).at = at;
  }
  busy_.pop_back();
}

void ElasticWorld::endConnections(int of) {
  for (int i = 0; i < size(); ++i) {
    undetected_.erase({of, i});
    drop({i, of});
    if (i != of && !dead(i)) undetected_.insert({i, of});
  }
}

// Both ends have another one at once, and know that.
void ElasticWorld::breakConnection(int a, int b) {
  drop({a, b});
  drop({b, a});
  for (const auto& [one, other] : {Way{a, b}, Way{b, a}}) {
    if (!dead(one)) carryOut(one, cores_[static_cast<size_t>(one)].connected(idOf(other)));
  }
}

void ElasticWorld::take(const ElasticAction& action) {
  using Kind = ElasticAction::Kind;
  const auto a = static_cast<size_t>(action.a);
  switch (action.kind) {
    case Kind::kDeliver: {
      const auto message = takeFirst({action.a, action.b});
      ElasticCore& receiver = cores_[static_cast<size_t>(action.b)];
      carryOut(action.b, receiver.receive(idOf(action.a), *message));
      // Its group has failed, as below.
      if (message->kind == ElasticKind::kParted && message->lineage == receiver.view().lineage) {
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
      store_[a].reply.reset();  // a request may still reach the store
      endConnections(action.a);
      break;
    case Kind::kDetect: {
      undetected_.erase({action.a, action.b});
      drop({action.b, action.a});  // the rest is lost
      carryOut(action.a,
               cores_[a].lose(idOf(action.b), dead(action.b) ? Loss::kDead : Loss::kUnreachable));
      // Its group has failed: the user awaits another view.
      if (core(action.a).view().has(idOf(action.b)) && (dead(action.b) || !options_.groups_stand)) {
        carryOut(action.a, cores_[a].want(core(action.a).view().number));
      }
      break;
    }
    case Kind::kSuspect:
      --left_.suspicions;
      carryOut(action.a, cores_[a].lose(idOf(action.b), Loss::kFrozen));
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
      if (!witness_lost_) {
        store_[a].reply = answer(*store_[a].request);
      } else {
        WitnessReply reply;
        reply.what = store_[a].request->what;
        reply.lineage = store_[a].request->lineage;
        reply.number = store_[a].request->number;
        reply.ballot = store_[a].request->ballot;
        store_[a].reply = reply;
      }
      store_[a].request.reset();
      break;
    case Kind::kReply: {
      const WitnessReply reply = std::move(*store_[a].reply);
      store_[a].reply.reset();
      carryOut(action.a, cores_[a].witnessAnswered(reply));
      break;
    }
    case Kind::kRestart:
      --left_.witness_restarts;
      ++store_identity_;
      held_.clear();
      break;
    case Kind::kLoseWitness:
      --left_.witness_losses;
      witness_lost_ = true;
      break;
    case Kind::kLook:
      seen_identity_[a] = store_identity_;
      cores_[a].setWitness(core(action.a).view().lineage, identityTo(lineageOf(action.a)));
      break;
    case Kind::kBreak:
      --left_.breaks;
      breakConnection(action.a, action.b);
      break;
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
      seen_identity_[a] = 0;
      carryOut(action.a, cores_[a].beginLineage(lineage));
      break;
    }
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
          carryOut(i, cores_[static_cast<size_t>(i)].connected(idOf(j)));
        }
      }
      break;
  }
  if (has_news_) checkHistory();
}

void ElasticWorld::vote(int i, bool ok) {
  const auto at = static_cast<size_t>(i);
  const ViewKey view = keyOf(core(i).view());
  ++asked_[at];
  pending_[at] = true;
  has_news_ = true;
  if (!ok) said_no_[{view, static_cast<uint64_t>(asked_[at])}].insert(i);
  Vote vote;
  vote.ok = ok;
  carryOut(i, cores_[at].agree(view.second, std::move(vote)));
}

WitnessReply ElasticWorld::answer(const WitnessRequest& request) {
  WitnessReply reply;
  reply.what = request.what;
  reply.lineage = request.lineage;
  reply.number = request.number;
  reply.ballot = request.ballot;
  const LineageNumber lineage = numberOf(request.lineage);
  const auto found = held_.find(lineage);
  const uint64_t last = found == held_.end() ? 0 : found->second.view.number;
  reply.has_vote = last <= request.number && (request.identity == identityTo(lineage) ||
                                              !options_.parts.witness_is_the_views);
  if (last == request.number) reply.held = found->second;
  if (last > request.number && request.identity == identityTo(lineage)) {
    reply.later = found->second.view;
  }
  if (!reply.has_vote || request.what == WitnessRequest::What::kRead) return reply;
  const bool decides = request.what == WitnessRequest::What::kDecide;
  if (decides && reply.held) {
    reply.decided = reply.held->view;
  } else if (decides || reply.held == request.expected) {
    held_[lineage] = {request.ballot, *request.view};
    reply.claimed = !decides;
    if (decides) reply.decided = request.view;
  }
  return reply;
}

void ElasticWorld::carryOut(int i, ElasticEffects effects) {
  const auto at = static_cast<size_t>(i);
  for (auto& [to, message] : effects.sends) {
    const int j = indexOf(to);
    if (j < 0 || j >= size() || dead(j) || isCut(i, j)) continue;
    send({i, j}, std::move(message));
  }
  if (effects.left_out && core(i).isMute()) endConnections(i);
  if (effects.witness) store_[at].request = std::move(effects.witness);
  if (effects.new_view) {
    asked_[at] = 0;
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

void ElasticWorld::fail(const std::string& what) {
  if (wrong_.empty()) wrong_ = what;
}

void ElasticWorld::checkView(int i) {
  View view = core(i).view();
  view.secret = {};  // others than its members are not told
  const LineageNumber lineage = numberOf(view.lineage);
  const bool was_asked_for = i >= options_.members;  // by a newcomer
  if (lineage != 1 && lineage != i + 2 && !was_asked_for) {
    fail("member " + std::to_string(i) + " is in another's lineage");
  }
  has_news_ = true;
  const auto [known, fresh] = views_.try_emplace(keyOf(view), view);
  if (!fresh && known->second != view) {
    fail("two views have the number " + std::to_string(view.number));
  }
}

void ElasticWorld::checkAnswer(int i, const Outcome& outcome) {
  if (core(i).state() == ElasticCore::State::kLeftOut || dead(i)) return;  // it raises
  const Key key{{lineageOf(i), outcome.view}, outcome.index};
  has_news_ = true;
  const auto [known, fresh] = returned_.try_emplace(key, outcome.answer);
  if (!fresh && known->second.ok != outcome.answer.ok) {
    fail("two answers to agreement " + std::to_string(key.second) + " of view " +
         std::to_string(key.first.second));
  }
  returned_by_[key].insert(i);
}

// No later view may contradict an answer, and an ok needs all who went on.
void ElasticWorld::checkHistory() {
  has_news_ = false;
  for (const auto& [key, answer] : returned_) {
    if (!answer.ok || !views_.contains(key.first)) continue;
    const auto next = views_.find({key.first.first, key.first.second + 1});
    const View& judged = next == views_.end() ? views_.at(key.first) : next->second;
    for (const int i : said_no_[key]) {
      if (judged.has(idOf(i)) && views_.at(key.first).has(idOf(i))) {
        fail("ok although member " + std::to_string(i) + ", who goes on, said no");
      }
    }
    if (next != views_.end()) checkNext(key, next->second);
  }
}

// The view after an agreement that is ok.
void ElasticWorld::checkNext(const Key& key, const View& next) {
  const Outcome* outcome = next.outcomeOf(key.second);
  const std::string name = "view " + std::to_string(next.number);
  if (outcome != nullptr && !outcome->answer.ok) {
    fail(name + " takes back an ok of the one before");
  }
  for (const Member& member : next.members) {
    const bool was_there = views_.at(key.first).has(member.id);
    if (outcome == nullptr && was_there && !returned_by_[key].contains(indexOf(member.id))) {
      fail(name + " does not know an ok of the one before");
    }
  }
}

// ---- without faults

bool ElasticWorld::mustSettle() const {
  const std::set<LineageNumber> all = lineages();
  return std::any_of(all.begin(), all.end(), [&](LineageNumber one) { return mustSettle(one); });
}

bool ElasticWorld::mustSettle(LineageNumber lineage) const {
  if (!options_.cut.empty()) return false;
  const std::vector<View> binding = bindingViews(lineage);
  return std::all_of(binding.begin(), binding.end(),
                     [&](const View& view) { return mayBeDecidedAfter(view); });
}

// Every view that was decided, or that somebody has accepted for the next one: it may have to be
// taken up. And those whose learners may have been promoted, by what the living know.
std::vector<View> ElasticWorld::bindingViews(LineageNumber lineage) const {
  std::vector<View> all;
  const auto add = [&, from = firstThatBinds(lineage)](const View& view) {
    if (numberOf(view.lineage) == lineage && view.number >= from) all.push_back(view);
  };
  for (const auto& [key, view] : views_) add(view);
  for (const auto& [number, held] : held_) add(held.view);
  for (const View& view : accepted_by_parted_) add(view);
  for (int i = 0; i < size(); ++i) {
    if (core(i).accepted()) add(core(i).accepted()->view);
    if (isGoneFrom(lineage, i) || core(i).promotion() == Promotion::kNo) continue;
    View promoted = core(i).view();
    promoted.voters = idsOf(promoted.members);
    add(promoted);
  }
  return all;
}

// What the store has decided can be read there by who knows the view before it: that one needs
// nobody any more.
uint64_t ElasticWorld::firstThatBinds(LineageNumber lineage) const {
  const auto held = held_.find(lineage);
  if (!options_.store_rule || held == held_.end()) return 0;
  const uint64_t number = held->second.view.number;
  for (int i = 0; i < size(); ++i) {
    if (isGoneFrom(lineage, i) || core(i).state() == ElasticCore::State::kLeftOut) continue;
    const View& view = core(i).view();
    const bool reads_it = view.number + 1 == number && view.witness == identityTo(lineage);
    if (reads_it || view.number >= number) return number;
  }
  return 0;
}

// Where half of the voters live and the witness does, only safety is checked.
bool ElasticWorld::mayBeDecidedAfter(const View& view) const {
  const LineageNumber lineage = numberOf(view.lineage);
  const auto alive = static_cast<size_t>(
      std::count_if(view.voters.begin(), view.voters.end(),
                    [&](const MemberId& id) { return !isGoneFrom(lineage, indexOf(id)); }));
  if (!options_.store_rule || view.witness.isZero()) return 2 * alive > view.voters.size();
  return !witness_lost_ && view.witness == identityTo(lineage) &&
         alive >= std::min(view.voters.size(), static_cast<size_t>(options_.min_size));
}

bool ElasticWorld::hasSettled(LineageNumber lineage) const {
  const View& last = std::prev(views_.upper_bound({lineage, UINT64_MAX}))->second;
  for (const Member& member : last.members) {
    const int i = indexOf(member.id);
    if (!isGoneFrom(lineage, i) && core(i).state() == ElasticCore::State::kJoining) {
      return false;  // untold
    }
  }
  uint64_t newest = 0;
  for (int i = 0; i < size(); ++i) {
    if (!isGoneFrom(lineage, i)) newest = std::max(newest, core(i).view().number);
  }
  for (int i = 0; i < size(); ++i) {
    if (isGoneFrom(lineage, i) || core(i).state() == ElasticCore::State::kLeftOut) continue;
    if (core(i).state() == ElasticCore::State::kJoining) continue;
    if (core(i).state() != ElasticCore::State::kActive || core(i).view().number != newest ||
        pending_[static_cast<size_t>(i)]) {
      return false;
    }
    for (const Member& member : core(i).view().members) {
      if (isGoneFrom(lineage, indexOf(member.id))) return false;
    }
  }
  return true;
}

bool ElasticWorld::haveAllSettled() const {
  const std::set<LineageNumber> all = lineages();
  return std::all_of(all.begin(), all.end(),
                     [&](LineageNumber one) { return hasSettled(one) || !mustSettle(one); });
}

// What goes on by itself.
std::optional<ElasticAction> ElasticWorld::nextQuietly() const {
  using Kind = ElasticAction::Kind;
  if (!links_.empty()) {
    const Way& way = links_.begin()->first;
    return ElasticAction{Kind::kDeliver, way.first, way.second};
  }
  for (const Way& pair : undetected_) {
    if (canDetect(pair)) return ElasticAction{Kind::kDetect, pair.first, pair.second};
  }
  for (int i = 0; i < size(); ++i) {
    if (dead(i)) continue;
    const StoreOp& op = store_[static_cast<size_t>(i)];
    if (op.request) return ElasticAction{Kind::kWitness, i, 0};
    if (op.reply) return ElasticAction{Kind::kReply, i, 0};
    if (canSeeNewStore(i)) return ElasticAction{Kind::kLook, i, 0};
  }
  return std::nullopt;
}

// False: nothing happened.
bool ElasticWorld::runQuietly() {
  constexpr int kMostSteps = 1000000;
  for (int step = 0; step < kMostSteps && wrong_.empty(); ++step) {
    const auto next = nextQuietly();
    if (!next) return step > 0;
    take(*next);
  }
  fail("messages without end");
  return true;
}

std::string ElasticWorld::settle() {
  left_.retries = left_.deaths = left_.suspicions = left_.wants = left_.noes = 0;
  left_.witness_restarts = left_.witness_losses = left_.partings = left_.leaves = left_.breaks = 0;
  left_.heals = false;
  for (int round = 0; round < 40 && wrong_.empty(); ++round) {
    runQuietly();
    if (!wrong_.empty()) return wrong_;
    if (haveAllSettled()) return {};
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
  if (!wrong_.empty()) return wrong_;
  return haveAllSettled() ? "" : "it does not come to an end" + describeMembers();
}

std::string ElasticWorld::describeMembers() const {
  std::string text;
  for (int i = 0; i < size(); ++i) {
    if (dead(i)) continue;
    text += "; member " + std::to_string(i) + " in state " +
            std::to_string(static_cast<int>(core(i).state())) + " of view " +
            std::to_string(core(i).view().number) + " of";
    for (const Member& member : core(i).view().members) {
      text += " " + std::to_string(indexOf(member.id));
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
    const StoreOp& op = store_[at];
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
  for (const auto& [way, link] : links_) {
    writer.u8(static_cast<uint8_t>(way.first));
    writer.u8(static_cast<uint8_t>(way.second));
    writer.u8(static_cast<uint8_t>(link.messages.size()));
    for (const auto& message : link.messages) writer.text(encodeElasticMessage(*message));
  }
  for (const auto& [who, gone] : undetected_) {
    writer.u8(static_cast<uint8_t>(who));
    writer.u8(static_cast<uint8_t>(gone));
  }
  for (const auto& [lineage, held] : held_) writer.text(encodeAccepted(held));
  for (const int left : {left_.deaths, left_.suspicions, left_.noes, left_.retries, left_.wants,
                         left_.witness_restarts, left_.witness_losses, left_.heals ? 1 : 0,
                         static_cast<int>(store_identity_), witness_lost_ ? 1 : 0, left_.partings,
                         left_.leaves, left_.breaks}) {
    writer.u8(static_cast<uint8_t>(left));
  }
  for (const auto& [view_key, view] : views_) writer.text(encodeView(view));
  for (const View& view : accepted_by_parted_) writer.text(encodeView(view));
  for (const uint8_t seen : seen_identity_) writer.u8(seen);
  for (const auto& [key, answer] : returned_) {
    writer.u64(key.first.second);
    writer.u64(key.second);
    writer.u8(answer.ok ? 1 : 0);
    const auto by = returned_by_.find(key);
    for (const int i : by->second) writer.u8(static_cast<uint8_t>(i));
  }
  for (const auto& [key, members] : said_no_) {
    writer.u64(key.first.second);
    for (const int i : members) writer.u8(static_cast<uint8_t>(i));
  }
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

#include "elastic/elastic_core.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/hmac.h"
#include "elastic/elastic_codec.h"
#include "elastic/next_view.h"
#include "elastic/view_check.h"

namespace torchft_ext {
namespace {

constexpr uint32_t kMostRounds = uint32_t{1} << 31U;  // of a number; no member counts so far

// By rank, of those who were members before. Null: all are newcomers.
const Member* firstThatWentOn(const View& view) {
  const auto first = std::find_if(view.members.begin(), view.members.end(),
                                  [&](const Member& member) { return member.since < view.number; });
  return first == view.members.end() ? nullptr : &*first;
}

bool isNewIn(const View& view, const MemberId& id) {
  const int rank = view.rankOf(id);
  return rank >= 0 && view.members[static_cast<size_t>(rank)].since == view.number;
}

}  // namespace

ElasticCore::ElasticCore(Member self, ElasticRules rules, View view)
    : self_(std::move(self)),
      rules_(rules),
      state_(State::kActive),
      view_(std::move(view)),
      agreements_(makeAgreements()) {}

ElasticCore::ElasticCore(Member self, ElasticRules rules, std::vector<MemberId> contacts)
    : self_(std::move(self)), rules_(rules), contacts_(std::move(contacts)) {}

Agreements ElasticCore::makeAgreements() const {
  const bool may_relay = view_.members.size() > rules_.parts.most_tell_directly;
  Agreements agreements(self_.id, view_, may_relay, rules_.parts.second_round);
  if (losses_.hasOf(view_)) agreements.tellDirectly();  // nothing has been said yet
  return agreements;
}

std::vector<MemberId> ElasticCore::unheard() const {
  std::vector<MemberId> ids;
  if (state_ == State::kJoining) return contacts_;
  for (const Member& member : view_.members) {
    if (member.id == self_.id || losses_.has(member.id)) continue;
    const Proposal* proposal = decision_.proposal();
    const bool by_proposal = proposal != nullptr && !proposal->hasPromised(member.id);
    const bool decides = decision_.isWanted() && proposal == nullptr;
    if (by_proposal || decides || agreements_.awaits(member.id)) ids.push_back(member.id);
  }
  return ids;
}

bool ElasticCore::setContacts(std::vector<MemberId> contacts) {
  if (state_ != State::kJoining || contacts == contacts_) return false;
  contacts_ = std::move(contacts);
  return true;
}

bool ElasticCore::hasNoContactLeft() const {
  return state_ == State::kJoining &&
         std::all_of(contacts_.begin(), contacts_.end(),
                     [&](const MemberId& id) { return losses_.isGoneForGood(id); });
}

std::set<MemberId> ElasticCore::everybody() const {
  std::set<MemberId> ids(contacts_.begin(), contacts_.end());
  for (const Member& member : view_.members) ids.insert(member.id);
  for (const auto& [id, member] : waiting_) ids.insert(id);
  return ids;
}

std::vector<Member> ElasticCore::newcomers() const {
  std::vector<Member> all;
  all.reserve(waiting_.size());
  for (const auto& [id, member] : waiting_) all.push_back(member);
  return all;
}

std::vector<MemberId> ElasticCore::waiting() const {
  std::vector<MemberId> ids;
  ids.reserve(waiting_.size());
  for (const auto& [id, member] : waiting_) {
    if (!holdsBack(id)) ids.push_back(id);
  }
  return ids;
}

std::vector<MemberId> ElasticCore::heldBack() const {
  std::vector<MemberId> ids;
  for (const auto& [id, member] : waiting_) {
    if (holdsBack(id)) ids.push_back(id);
  }
  return ids;
}

ElasticMessage ElasticCore::make(ElasticKind kind) const {
  ElasticMessage message;
  message.kind = kind;
  message.lineage = view_.lineage;
  message.number = view_.number;
  return message;
}

void ElasticCore::send(Effects& effects, const MemberId& to, ElasticMessage message) const {
  if (to == self_.id) return;
  effects.sends.push_back({to, std::make_shared<const ElasticMessage>(std::move(message))});
}

void ElasticCore::sendToMembers(Effects& effects, const ElasticMessage& message) const {
  const auto shared = std::make_shared<const ElasticMessage>(message);
  for (const Member& member : view_.members) {
    if (member.id == self_.id || losses_.isGoneForGood(member.id)) continue;
    effects.sends.push_back({member.id, shared});
  }
}

// Nobody can tell it from a random one who does not know the seed.
ViewSecret ElasticCore::secretOf(const Lineage& lineage, uint64_t number) const {
  if (seed_.isZero()) return {};
  ByteWriter writer;
  writer.raw(lineage.bytes);
  writer.u64(number);
  writer.u64(decision_.promised().round);  // who accepted another ballot does not know this one's
  const std::string_view key(reinterpret_cast<const char*>(seed_.bytes.data()), seed_.bytes.size());
  const Digest256 digest = hmacSha256(key, writer.take());
  ViewSecret secret;
  std::copy_n(digest.begin(), secret.bytes.size(), secret.bytes.begin());
  return secret;
}

// ---- what comes in

ElasticEffects ElasticCore::receive(const MemberId& from, const ElasticMessage& message) {
  Effects effects;
  if (message.ballot.round > kMostRounds || unsealed_) return effects;
  losses_.hear(from);
  if (message.kind == ElasticKind::kView) {
    if (state_ != State::kJoining && isApart(message.lineage)) {
      effects = lose(from, Loss::kParted);  // a view comes from nobody who is not in its lineage
      onOtherLineage(effects, from, message);
    } else {
      hearView(effects, from, *message.view);
    }
    return effects;
  }
  if (message.kind == ElasticKind::kJoin) {
    if (message.members.front().id == from) onJoin(effects, message);
    return effects;
  }
  if (message.kind == ElasticKind::kParted) {
    return message.lineage == view_.lineage ? lose(from, Loss::kParted) : effects;
  }
  if (state_ == State::kJoining) {
    if (message.kind == ElasticKind::kBehind) return effects;
    ElasticMessage answer = make(ElasticKind::kBehind);  // it knows of this member's place already
    answer.lineage = message.lineage;
    send(effects, from, std::move(answer));
    return effects;
  }
  if (onOtherView(effects, from, message)) return effects;
  if (!view_.has(from)) return effects;
  switch (message.kind) {
    case ElasticKind::kVote:
    case ElasticKind::kCompleted:
      carryOutAgreement(effects, agreements_.hear(from, message));
      recoverAgreement();
      pursue(effects);
      break;
    case ElasticKind::kRequest:
      decision_.want();
      if (decision_.proposal() == nullptr && !decision_.followsAnother(self_.id, losses_)) {
        propose(effects);
      }
      break;
    case ElasticKind::kPrepare:
      onPrepare(effects, from, message);
      break;
    case ElasticKind::kPromise:
      if (message.promise.accepted && !believes(effects, message.promise.accepted->view)) break;
      carryOut(effects, decision_.promised(from, message.ballot, message.promise, losses_));
      break;
    case ElasticKind::kRefused:
      decision_.refused(message.ballot);
      break;
    case ElasticKind::kAccept:
      onAccept(effects, from, message);
      break;
    case ElasticKind::kAccepted:
      carryOut(effects, decision_.accepted(from, message.ballot, losses_));
      break;
    default:
      break;
  }
  return effects;
}

bool ElasticCore::isApart(const Lineage& lineage) const {
  return lineage != view_.lineage && rules_.parts.lineages_apart;
}

// Is the message about another view than the newest one known here? Then that is what is answered.
bool ElasticCore::onOtherView(Effects& effects, const MemberId& from,
                              const ElasticMessage& message) {
  if (isApart(message.lineage)) {
    onOtherLineage(effects, from, message);
    return true;
  }
  if (message.number < view_.number) {
    tellView(effects, {from}, view_);
    if (message.kind == ElasticKind::kBehind && view_.has(from)) repeatTo(effects, from);
    return true;
  }
  if (state_ == State::kLeftOut) return true;
  if (message.number == view_.number) {
    if (message.kind != ElasticKind::kBehind) return false;
    if (view_.has(from)) repeatTo(effects, from);
    return true;
  }
  if (message.kind != ElasticKind::kBehind) send(effects, from, make(ElasticKind::kBehind));
  return true;
}

// Of another lineage this member hears nothing; but who counts on it there may wait for it.
void ElasticCore::onOtherLineage(Effects& effects, const MemberId& from,
                                 const ElasticMessage& message) const {
  ElasticMessage answer = make(ElasticKind::kParted);
  answer.lineage = message.lineage;
  send(effects, from, std::move(answer));
}

// Its secret is for its members alone.
void ElasticCore::tellView(Effects& effects, const std::vector<MemberId>& to,
                           const View& view) const {
  std::shared_ptr<const ElasticMessage> for_members;
  std::shared_ptr<const ElasticMessage> for_others;
  for (const MemberId& id : to) {
    if (id == self_.id || losses_.isGoneForGood(id)) continue;
    // Who is left out cannot know a newcomer by anything but its id: the members tell it.
    const bool is_member = view.has(id) && !(isNewIn(view, id) && state_ == State::kLeftOut);
    auto& shared = is_member ? for_members : for_others;
    if (!shared) {
      ElasticMessage message = make(ElasticKind::kView);
      message.number = view.number;
      message.view = view;
      if (!is_member) message.view->secret = {};
      shared = std::make_shared<const ElasticMessage>(std::move(message));
    }
    effects.sends.push_back({id, shared});
  }
}

// What may have been sent to a member that did not know this view yet.
void ElasticCore::repeatTo(Effects& effects, const MemberId& to) {
  for (ElasticMessage& message : agreements_.saidSoFar()) send(effects, to, std::move(message));
  const Proposal* proposal = decision_.proposal();
  if (proposal != nullptr && proposal->stage() == Proposal::Stage::kPreparing) {
    send(effects, to, decision_.question());
  }
}

void ElasticCore::onJoin(Effects& effects, const ElasticMessage& message) {
  if (state_ == State::kJoining) return;
  const Member& newcomer = message.members.front();
  if (state_ == State::kLeftOut) {
    handOverTo(effects, newcomer);
  } else if (view_.has(newcomer.id)) {
    tellView(effects, {newcomer.id}, view_);
  } else {
    waiting_.insert_or_assign(newcomer.id, newcomer);
  }
}

// Where no member of a view was in the one before, those that decided on it are all that a newcomer
// in it can ask. It is told where the view has it, not where somebody asks under its id.
void ElasticCore::handOverTo(Effects& effects, const Member& newcomer) const {
  const int rank = view_.rankOf(newcomer.id);
  if (rank < 0 || firstThatWentOn(view_) != nullptr) return;
  const bool knows_secret = isSecretOf(view_.secret, view_) || view_.secret_digest.isZero();
  if (!knows_secret || view_.members[static_cast<size_t>(rank)].record != newcomer.record) return;
  ElasticMessage answer = make(ElasticKind::kView);
  answer.view = view_;
  send(effects, newcomer.id, std::move(answer));
}

ElasticEffects ElasticCore::lose(const MemberId& id, Loss loss) {
  Effects effects;
  if (!losses_.add(id, loss)) return effects;
  waiting_.erase(id);
  if (state_ == State::kJoining || state_ == State::kLeftOut || !view_.has(id)) return effects;
  carryOutAgreement(effects, isFinal(loss) ? agreements_.tellDirectly() : agreements_.lose(id));
  carryOut(effects, decision_.lookAgain(losses_));
  recoverAgreement();
  pursue(effects);
  return effects;
}

// ---- agreements

ElasticEffects ElasticCore::agree(uint64_t view, Vote vote) {
  Effects effects;
  asked_.ask(view);
  if (view != view_.number || state_ == State::kLeftOut || state_ == State::kJoining) {
    answerFromView(effects);
    return effects;
  }
  vote.leaving = vote.leaving || leaving_;
  vote.new_witness = wantsWitness();
  if (!rules_.parts.digests_count) vote.digest = {};
  const auto most = static_cast<size_t>(rules_.max_size);
  const size_t room = most - std::min(most, view_.members.size());
  vote.held_back = heldBack();
  for (const MemberId& id : waiting()) {  // others are spares: nothing is to be done for them
    if (vote.waiting.size() >= room) break;
    vote.waiting.push_back(id);
  }
  carryOutAgreement(effects, agreements_.vote(vote));
  recoverAgreement();
  pursue(effects);
  return effects;
}

// Under the store's rule the first one is awaited, and none can take its place. By the members' a
// view of even size needs one at once; others get it with their next change.
bool ElasticCore::wantsWitness() const {
  if (witness_.isZero() || witness_ == view_.witness) return false;
  return rules_.store_rule ? view_.witness.isZero() : view_.members.size() % 2 == 0;
}

// Lost members end an agreement by another view; but not before all others have voted, since a
// missing vote would be a no.
void ElasticCore::recoverAgreement() {
  if (agreements_.stopped()) decision_.want();
  if (losses_.empty()) return;
  const std::set<MemberId> lost = losses_.ids();
  const bool stuck = std::any_of(lost.begin(), lost.end(), [&](const MemberId& id) {
    return agreements_.awaits(id) && !mayComeByOthers(id, lost);
  });
  if (stuck && agreements_.hasVotesOfAllBut(lost)) decision_.want();
}

// The word of a lost member that may live, from one that has not lost it, which finds out if it
// lacks that word too. Questions are half a second apart: longer than that takes, nobody waits.
bool ElasticCore::mayComeByOthers(const MemberId& id, const std::set<MemberId>& lost) const {
  constexpr int kPatience = 20;
  return !losses_.isGoneForGood(id) && questions_ < kPatience && agreements_.mayPassOn(id, lost);
}

void ElasticCore::carryOutAgreement(Effects& effects, Agreements::Step step) {
  for (ElasticEnvelope& send : step.sends) {
    if (!losses_.isGoneForGood(send.to))
      effects.sends.push_back({send.to, std::move(send.message)});
  }
  if (!step.returned) return;
  questions_ = 0;  // what was asked for has come
  asked_.close();
  effects.answers.push_back(std::move(*step.returned));
}

// What a new view says of the agreement that this member is in.
void ElasticCore::answerFromView(Effects& effects) {
  if (auto outcome = asked_.answerBy(view_.number)) effects.answers.push_back(*std::move(outcome));
}

// ---- as an acceptor

void ElasticCore::stop(Effects& effects) {
  if (state_ != State::kActive) return;
  state_ = State::kStopped;
  if (rules_.parts.stop_at_promise) agreements_.stop();
  effects.stopped = true;
}

Promise ElasticCore::promise() const {
  Promise promise;
  promise.accepted = decision_.accepted();
  promise.agreements = agreements_.reports();
  promise.promotion = agreements_.promotion();
  promise.waiting = newcomers();
  promise.held_back = heldBack();
  std::set<MemberPair> cut = cut_;
  for (const auto& [id, loss] : losses_.all()) {
    if (loss == Loss::kUnreachable) cut.insert(std::minmax(self_.id, id));
  }
  promise.cut.assign(cut.begin(), cut.end());
  promise.absent.assign(absent_.begin(), absent_.end());
  promise.shard = shard_;
  promise.witness = witness_;
  promise.ready = ready_;
  promise.leaving = leaving_;
  return promise;
}

void ElasticCore::onPrepare(Effects& effects, const MemberId& from, const ElasticMessage& message) {
  if (!decision_.promise(message.ballot)) {
    ElasticMessage refusal = make(ElasticKind::kRefused);
    refusal.ballot = decision_.promised();
    send(effects, from, std::move(refusal));
    return;
  }
  stop(effects);
  ElasticMessage answer = make(ElasticKind::kPromise);
  answer.ballot = message.ballot;
  answer.promise = promise();
  send(effects, from, std::move(answer));
}

void ElasticCore::onAccept(Effects& effects, const MemberId& from, const ElasticMessage& message) {
  if (message.view->number != view_.number + 1 || message.view->lineage != view_.lineage) return;
  if (!believes(effects, *message.view)) return;
  ElasticMessage answer = make(ElasticKind::kAccepted);
  answer.ballot = message.ballot;
  if (decision_.accept(message.ballot, *message.view)) {
    stop(effects);
  } else {
    answer.kind = ElasticKind::kRefused;
    answer.ballot = decision_.promised();
  }
  send(effects, from, std::move(answer));
}

// ---- as a proposer

ElasticEffects ElasticCore::want(uint64_t newer_than) {
  Effects effects;
  if (state_ == State::kJoining) return retry();
  if (state_ == State::kLeftOut || view_.number > newer_than) return effects;
  decision_.want();
  pursue(effects);
  return effects;
}

void ElasticCore::pursue(Effects& effects) {
  if (!isInView()) return;
  const std::optional<MemberId> proposer = decision_.proposer(view_, losses_);
  if (!proposer) return;
  if (*proposer == self_.id) {
    propose(effects);
  } else {
    send(effects, *proposer, make(ElasticKind::kRequest));
  }
}

void ElasticCore::propose(Effects& effects) {
  if (!isInView()) return;
  const Ballot ballot = decision_.nextBallot(self_.id);
  stop(effects);
  const Proposal proposal(view_, rules_, ballot, secretOf(view_.lineage, view_.number + 1));
  carryOut(effects, decision_.propose(proposal, promise(), losses_));
}

void ElasticCore::carryOut(Effects& effects, ViewDecision::Step step) {
  std::move(step.sends.begin(), step.sends.end(), std::back_inserter(effects.sends));
  if (step.witness) effects.witness = std::move(step.witness);
  if (!step.no_quorum.empty()) {
    effects.no_quorum = std::move(step.no_quorum);
    effects.hopeless = step.hopeless;
  }
  if (step.decided) decide(effects, *step.decided);
}

void ElasticCore::decide(Effects& effects, const View& decided) {
  // Newcomers: by a member that goes on, if there is one.
  const bool tells_newcomers = decided.has(self_.id) || firstThatWentOn(decided) == nullptr;
  std::vector<MemberId> all;
  for (const MemberId& id : idsOf(decided.members)) {
    if (tells_newcomers || view_.has(id)) all.push_back(id);
  }
  for (const MemberId& id : idsOf(view_.members)) {
    if (!decided.has(id)) all.push_back(id);
  }
  tellView(effects, all, decided);
  adopt(effects, decided);
}

ElasticEffects ElasticCore::witnessAnswered(const WitnessReply& reply) {
  Effects effects;
  if (decision_.proposal() == nullptr || reply.lineage != view_.lineage ||
      reply.number != view_.number + 1) {
    return effects;
  }
  if (rules_.storeDecidesAfter(view_) && reply.later && objectionTo(*reply.later).empty()) {
    adopt(effects, *reply.later);  // decided without this member, which has missed a view
    return effects;
  }
  WitnessReply heard = reply;
  const bool sound = (!reply.held || believes(effects, reply.held->view)) &&
                     (!reply.decided || believes(effects, *reply.decided));
  if (!sound) {  // whatever wrote that there: a store that holds it has no vote
    heard.has_vote = false;
    heard.held.reset();
    heard.decided.reset();
  }
  carryOut(effects, decision_.witnessAnswered(heard, losses_));
  return effects;
}

ElasticEffects ElasticCore::retry() {
  Effects effects;
  if (state_ == State::kLeftOut) return effects;
  if (state_ == State::kJoining) {
    if (!ready_) return effects;  // the others would wait for its user
    ElasticMessage message = make(ElasticKind::kJoin);
    message.members = {self_};
    message.reached = reached_;
    for (const MemberId& contact : contacts_) send(effects, contact, message);
    return effects;
  }
  decision_.noteFruitless();
  if (decision_.proposal() == nullptr) {
    pursue(effects);
  } else if (decision_.hasLostAcceptors(losses_)) {
    propose(effects);
  } else {
    carryOut(effects, decision_.repeat(losses_));
  }
  return effects;
}

ElasticEffects ElasticCore::askAgain() {
  Effects effects;
  if (state_ != State::kActive) return effects;
  const std::set<MemberId> lost = losses_.ids();
  const bool awaits_lost = std::any_of(lost.begin(), lost.end(), [&](const MemberId& id) {
    return !losses_.isGoneForGood(id) && agreements_.awaits(id) && agreements_.mayPassOn(id, lost);
  });
  std::vector<MemberId> living;
  for (const Member& member : view_.members) {
    if (member.id == self_.id || losses_.isGoneForGood(member.id)) continue;
    if (!losses_.has(member.id)) living.push_back(member.id);
    if (agreements_.awaits(member.id)) send(effects, member.id, make(ElasticKind::kBehind));
  }
  // The lost one's word comes to who still reaches it: one of them after the other is asked.
  if (awaits_lost && !living.empty()) {
    const MemberId& asked = living[static_cast<size_t>(questions_) % living.size()];
    if (!agreements_.awaits(asked)) send(effects, asked, make(ElasticKind::kBehind));
  }
  questions_ = awaits_lost ? questions_ + 1 : 0;
  recoverAgreement();
  pursue(effects);
  return effects;
}

ElasticEffects ElasticCore::connected(const MemberId& id) {
  Effects effects;
  if (state_ == State::kJoining || unsealed_) return effects;
  if (isInView() && view_.has(id)) {
    if (isNewIn(view_, id)) tellView(effects, {id}, view_);  // it may take part elsewhere by now
    repeatTo(effects, id);
  } else if (before_.contains(id)) {
    tellView(effects, {id}, view_);  // it may have been left out, and not know that
  }
  return effects;
}

ElasticEffects ElasticCore::disconnected(const MemberId& id) {
  Effects effects;
  if (isInView() && view_.has(id) && !losses_.isGoneForGood(id)) {
    send(effects, id, make(ElasticKind::kBehind));
  }
  return effects;
}

// ---- the next view

void ElasticCore::hearView(Effects& effects, const MemberId& from, const View& view) {
  if (state_ == State::kLeftOut || (state_ != State::kJoining && view.number <= view_.number)) {
    return;  // it is known
  }
  if (state_ == State::kJoining && view.lineage == seen_.first && view.number <= seen_.second) {
    return;  // another one has followed it, without this newcomer
  }
  View whole = view;
  // Whoever tells it may not be in it, and so not know the secret; this member has accepted it.
  const auto& accepted = decision_.accepted();
  if (view.secret.isZero() && accepted && isSecretOf(accepted->view.secret, view)) {
    whole.secret = accepted->view.secret;
  }
  effects.refused = objectionToTold(whole, knownOf(whole), from, whole.has(self_.id));
  if (effects.refused.empty()) {
    adopt(effects, whole);
    tellNewcomers(effects);
  } else if (isDecidedWithout(whole, from)) {
    // Its secret is all that is missing. Who told it does not know that, and will not promise any
    // more: it must not be waited for.
    effects = lose(from, Loss::kLeftOut);
  } else if (state_ != State::kJoining && view_.has(from)) {
    // True or not: nor will this one.
    std::string refused = std::move(effects.refused);
    effects = lose(from, Loss::kAhead);
    effects.refused = std::move(refused);
  }
}

// Whoever decided on the view may not be in it. So the first of those who went on tells them; where
// none did, each newcomer that has been told. One that takes part elsewhere by now answers so.
void ElasticCore::tellNewcomers(Effects& effects) const {
  if (state_ == State::kJoining || state_ == State::kLeftOut) return;
  const Member* first = firstThatWentOn(view_);
  if (first != nullptr && first->id != self_.id) return;
  std::vector<MemberId> newcomers;
  for (const Member& member : view_.members) {
    if (member.since == view_.number) newcomers.push_back(member.id);
  }
  tellView(effects, newcomers, view_);
}

// Is it the next view, but for its secret, and one that this member of the present view is not in?
bool ElasticCore::isDecidedWithout(const View& view, const MemberId& id) const {
  return state_ != State::kJoining && view.number == view_.number + 1 && view_.has(id) &&
         !view.has(id) && objectionToTold(view, knownOf(view), id, /*needs_secret=*/false).empty();
}

// The view to judge it by. Null: a newcomer knows none, nor does anybody of another lineage.
const View* ElasticCore::knownOf(const View& view) const {
  return state_ != State::kJoining && view.lineage == view_.lineage ? &view_ : nullptr;
}

// Of a value for the next view, as a member or the store has it. Who takes it up tells its members
// its secret.
bool ElasticCore::believes(Effects& effects, const View& value) const {
  const bool next = !isApart(value.lineage) && value.number == view_.number + 1;  // is sealed
  effects.refused = next ? objectionToTold(value, knownOf(value), self_.id, /*needs_secret=*/true)
                         : "view " + std::to_string(value.number) + ": it is not the next one";
  return effects.refused.empty();
}

void ElasticCore::adopt(Effects& effects, const View& view) {
  const bool first = state_ == State::kJoining;
  if (state_ == State::kLeftOut) return;
  if (!first && (isApart(view.lineage) || view.number <= view_.number)) return;
  if (first && !view.has(self_.id)) {
    contacts_ = idsOf(view.members);
    seen_ = {view.lineage, view.number};
    return;
  }
  // Who goes on has promised in the view before, so it knows that one: a member that missed one has
  // been left out of it, whoever lists it again by an old word.
  const bool missed_one = !first && view.number > view_.number + 1;
  install(effects, view);
  if (!view_.has(self_.id) || missed_one) {
    state_ = State::kLeftOut;
    unsealed_ = missed_one;
    effects.left_out = true;
    asked_.close();  // what became of it is not known here
    // Whoever decided on it may die before others have heard of it.
    if (!unsealed_) tellView(effects, {before_.begin(), before_.end()}, view_);
    return;
  }
  state_ = State::kActive;
  answerFromView(effects);
  if (losses_.hasOf(view_)) {  // it cannot form
    decision_.want();
    pursue(effects);
  }
}

void ElasticCore::install(Effects& effects, const View& view) {
  if (state_ == State::kActive) effects.stopped = true;
  lost_before_ = losses_.all();
  std::erase_if(lost_before_,
                [&](const auto& loss) { return !view_.has(loss.first) || view.has(loss.first); });
  const std::vector<MemberId> before = idsOf(view_.members);
  before_ = {before.begin(), before.end()};
  view_ = view;
  forgetOldView();
  agreements_ = makeAgreements();
  effects.new_view = true;
  asked_.remember(view_.outcomes);
}

void ElasticCore::forgetOldView() {
  decision_ = {};
  questions_ = 0;
  cut_.clear();
  absent_.clear();
  contacts_.clear();
  reached_.clear();
  seen_ = {};
  for (const Member& member : view_.members) waiting_.erase(member.id);
  losses_.beginView(view_, waiting_);
}

// What this member alone knows decides: the store has no register for that lineage yet.
ElasticEffects ElasticCore::beginLineage(const Lineage& lineage) {
  Effects effects;
  if (!isInView()) return effects;
  sendToMembers(effects, make(ElasticKind::kParted));
  agreements_.stop();
  waiting_.clear();  // they asked the old lineage
  Promise own = promise();
  own.leaving = false;
  View next = nextView(view_, {{self_.id, std::move(own)}}, {}, rules_);
  next.lineage = lineage;
  next.witness = witness_ = {};  // another one to each lineage
  setSecret(next, secretOf(next.lineage, next.number));
  install(effects, next);
  state_ = State::kActive;
  answerFromView(effects);
  return effects;
}

// ---- the model checker's

std::string ElasticCore::fingerprint() const {
  ByteWriter writer;
  writer.raw(self_.id.bytes);
  writer.u8(static_cast<uint8_t>(state_));
  write(writer, view_);
  const auto ids = [&](const auto& set) {
    writer.u32(static_cast<uint32_t>(set.size()));
    for (const MemberId& id : set) writer.raw(id.bytes);
  };
  ids(contacts_);
  ids(reached_);
  writer.raw(seen_.first.bytes);
  writer.u64(seen_.second);
  ids(before_);
  writer.u32(static_cast<uint32_t>(losses().size()));
  for (const auto& [id, loss] : losses()) {
    writer.raw(id.bytes);
    writer.u8(static_cast<uint8_t>(loss));
  }
  ids(waiting());
  ids(heldBack());
  writer.raw(witness_.bytes);
  writer.raw(seed_.bytes);
  for (const auto& [one, other] : cut_) {
    writer.raw(one.bytes);
    writer.raw(other.bytes);
  }
  ids(absent_);
  writer.u8(static_cast<uint8_t>((leaving_ ? 1 : 0) | (ready_ ? 2 : 0) | (unsealed_ ? 4 : 0)));
  writer.u32(shard_ ? *shard_ + 1 : 0);
  writer.u32(static_cast<uint32_t>(questions_));
  writer.text(decision_.fingerprint());
  writer.text(agreements_.fingerprint());
  const auto unanswered = asked_.unanswered().value_or(AskedAgreements::Place{});
  for (const auto& place : {unanswered, asked_.last()}) {
    writer.u64(place.view);
    writer.u64(place.index);
  }
  return writer.take();
}

}  // namespace torchft_ext

#include "elastic/elastic_core.h"

#include <algorithm>
#include <utility>

#include "base/hmac.h"
#include "elastic/elastic_codec.h"
#include "elastic/next_view.h"
#include "elastic/quorum.h"
#include "elastic/view_check.h"

namespace torchft_ext {
namespace {

constexpr uint32_t kMostRounds = uint32_t{1} << 31U;  // of a number; no member counts so far

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
  if (hasLostMembers()) agreements.tellDirectly();  // nothing has been said yet
  return agreements;
}

std::vector<MemberId> ElasticCore::unheard() const {
  std::vector<MemberId> ids;
  if (state_ == State::kJoining) return contacts_;
  for (const Member& member : view_.members) {
    if (member.id == self_.id || losses_.contains(member.id)) continue;
    const bool by_proposal = proposal_ && !proposal_->hasPromised(member.id);
    const bool decides = wanted_ && !proposal_;
    if (by_proposal || decides || agreements_.awaits(member.id)) ids.push_back(member.id);
  }
  return ids;
}

bool ElasticCore::setContacts(std::vector<MemberId> contacts) {
  if (state_ != State::kJoining || contacts == contacts_) return false;
  contacts_ = std::move(contacts);
  return true;
}

bool ElasticCore::isForsaken() const {
  return state_ == State::kJoining &&
         std::all_of(contacts_.begin(), contacts_.end(), [&](const MemberId& id) {
           const auto loss = losses_.find(id);
           return loss != losses_.end() && isFinal(loss->second);
         });
}

std::set<MemberId> ElasticCore::everybody() const {
  std::set<MemberId> ids(contacts_.begin(), contacts_.end());
  for (const Member& member : view_.members) ids.insert(member.id);
  for (const auto& [id, member] : waiting_) ids.insert(id);
  return ids;
}

std::vector<MemberId> ElasticCore::waiting() const {
  std::vector<MemberId> ids;
  ids.reserve(waiting_.size());
  for (const auto& [id, member] : waiting_) ids.push_back(id);
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
    if (member.id == self_.id || isGoneForGood(member.id)) continue;
    effects.sends.push_back({member.id, shared});
  }
}

bool ElasticCore::isGoneForGood(const MemberId& id) const {
  const auto loss = losses_.find(id);
  return loss != losses_.end() && isFinal(loss->second);
}

std::set<MemberId> ElasticCore::gone() const {
  std::set<MemberId> gone;
  for (const auto& [id, loss] : losses_) gone.insert(id);
  return gone;
}

// The lowest living rank; where that comes to nothing, the others in turn: it may be cut off from
// the witness, or from somebody whom this member reaches.
std::optional<MemberId> ElasticCore::proposerNow() const {
  constexpr uint32_t kFirstTries = 4;
  constexpr uint32_t kMostTries = 1024;
  std::vector<MemberId> living;
  for (const Member& member : view_.members) {
    if (!losses_.contains(member.id)) living.push_back(member.id);
  }
  if (living.empty()) return std::nullopt;
  // Each round gives each of them twice the time of the round before: what takes longer than a turn
  // must not be cut short for ever.
  uint32_t tries = kFirstTries;
  size_t turn = 0;
  for (uint32_t left = fruitless_; left >= tries; ++turn) {
    left -= tries;
    if ((turn + 1) % living.size() == 0 && tries < kMostTries) tries *= 2;
  }
  return living[turn % living.size()];
}

// Nobody can tell it from a random one who does not know the seed.
ViewSecret ElasticCore::secretOf(const Lineage& lineage, uint64_t number) const {
  if (seed_.isZero()) return {};
  ByteWriter writer;
  writer.raw(lineage.bytes);
  writer.u64(number);
  writer.u64(promised_.round);  // who accepted another ballot does not know this one's
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
  const auto loss = losses_.find(from);
  if (loss != losses_.end() && !isFinal(loss->second)) losses_.erase(loss);  // it is back
  if (message.kind == ElasticKind::kView) {
    if (state_ != State::kJoining && isApart(message.lineage)) {
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
      wanted_ = true;
      if (!proposal_ && !followsAnother()) propose(effects);
      break;
    case ElasticKind::kPrepare:
      onPrepare(effects, from, message);
      break;
    case ElasticKind::kPromise:
      if (message.promise.accepted && !believes(effects, message.promise.accepted->view)) break;
      if (proposal_ && proposal_->ballot() == message.ballot) {
        carryOut(effects, proposal_->promised(from, message.promise, gone()));
      }
      break;
    case ElasticKind::kRefused:
      highest_round_ = std::max(highest_round_, message.ballot.round);
      if (proposal_ && message.ballot > proposal_->ballot()) proposal_.reset();
      break;
    case ElasticKind::kAccept:
      onAccept(effects, from, message);
      break;
    case ElasticKind::kAccepted:
      if (proposal_ && proposal_->ballot() == message.ballot) {
        carryOut(effects, proposal_->accepted(from));
      }
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
    if (id == self_.id || isGoneForGood(id)) continue;
    // Who is not in it cannot know a newcomer by anything but its id: the members tell it.
    const int rank = view.rankOf(id);
    const bool newcomer = rank >= 0 && view.members[static_cast<size_t>(rank)].since == view.number;
    const bool is_member = rank >= 0 && !(newcomer && !view.has(self_.id));
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
  if (!proposal_ || proposal_->stage() != Proposal::Stage::kPreparing) return;
  ElasticMessage message = make(ElasticKind::kPrepare);
  message.ballot = proposal_->ballot();
  send(effects, to, std::move(message));
}

void ElasticCore::onJoin(Effects& effects, const ElasticMessage& message) {
  if (state_ == State::kJoining || state_ == State::kLeftOut) return;
  const Member& newcomer = message.members.front();
  if (view_.has(newcomer.id)) {
    tellView(effects, {newcomer.id}, view_);
  } else {
    waiting_.insert_or_assign(newcomer.id, newcomer);
  }
}

ElasticEffects ElasticCore::lose(const MemberId& id, Loss loss) {
  Effects effects;
  const auto [known, fresh] = losses_.try_emplace(id, loss);
  if (!fresh) {
    if (isFinal(known->second) || known->second == loss) return effects;
    known->second = loss;
  }
  waiting_.erase(id);
  if (state_ == State::kJoining || state_ == State::kLeftOut || !view_.has(id)) return effects;
  carryOutAgreement(effects, isFinal(loss) ? agreements_.tellDirectly() : agreements_.lose(id));
  if (proposal_) carryOut(effects, proposal_->lookAgain(gone()));
  recoverAgreement();
  pursue(effects);
  return effects;
}

// ---- agreements

ElasticEffects ElasticCore::agree(uint64_t view, Vote vote) {
  Effects effects;
  last_asked_ = {view, last_asked_.view == view ? last_asked_.index + 1 : 1};
  unanswered_ = last_asked_;
  if (view != view_.number || state_ == State::kLeftOut || state_ == State::kJoining) {
    answerFromView(effects);
    return effects;
  }
  vote.leaving = vote.leaving || leaving_;
  vote.new_witness = wantsWitness();
  const auto most = static_cast<size_t>(rules_.max_size);
  const size_t room = most - std::min(most, view_.members.size());
  for (const auto& [id, member] : waiting_) {  // others are spares: nothing is to be done for them
    if (vote.waiting.size() >= room) break;
    vote.waiting.push_back(id);
  }
  carryOutAgreement(effects, agreements_.vote(vote));
  recoverAgreement();
  pursue(effects);
  return effects;
}

// Only a view of even size needs one at once: others get it with their next change.
bool ElasticCore::wantsWitness() const {
  return !rules_.store_rule && !witness_.isZero() && witness_ != view_.witness &&
         view_.members.size() % 2 == 0;
}

// Lost members end an agreement by another view; but not before all others have voted, since a
// missing vote would be a no.
void ElasticCore::recoverAgreement() {
  if (agreements_.stopped()) wanted_ = true;
  if (losses_.empty()) return;
  const std::set<MemberId> lost = gone();
  const bool stuck = std::any_of(losses_.begin(), losses_.end(), [&](const auto& loss) {
    return agreements_.awaits(loss.first) && !mayComeByOthers(loss.first, lost);
  });
  if (stuck && agreements_.hasVotesOfAllBut(lost)) wanted_ = true;
}

// The word of a lost member that may live, from one that has not lost it, which finds out if it
// lacks that word too. Questions are half a second apart: longer than that takes, nobody waits.
bool ElasticCore::mayComeByOthers(const MemberId& id, const std::set<MemberId>& lost) const {
  constexpr int kPatience = 20;
  return !isGoneForGood(id) && questions_ < kPatience && agreements_.mayPassOn(id, lost);
}

void ElasticCore::carryOutAgreement(Effects& effects, Agreements::Step step) {
  for (Agreements::Send& send : step.sends) {
    if (!isGoneForGood(send.to)) effects.sends.push_back({send.to, std::move(send.message)});
  }
  if (!step.returned) return;
  questions_ = 0;  // what was asked for has come
  unanswered_.reset();
  effects.answers.push_back(std::move(*step.returned));
}

// What a new view says of the agreement that this member is in.
void ElasticCore::answerFromView(Effects& effects) {
  if (!unanswered_ || unanswered_->view >= view_.number) return;
  const auto outcome = std::find_if(known_.begin(), known_.end(), [&](const Outcome& known) {
    return known.view == unanswered_->view && known.index == unanswered_->index;
  });
  // Where nobody who went on knew of it, it is a no.
  effects.answers.push_back(
      outcome != known_.end() ? *outcome : Outcome{unanswered_->view, unanswered_->index, {}});
  unanswered_.reset();
}

bool ElasticCore::hasLostMembers() const {
  return std::any_of(view_.members.begin(), view_.members.end(),
                     [&](const Member& member) { return losses_.contains(member.id); });
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
  promise.accepted = accepted_;
  promise.agreements = agreements_.reports();
  promise.promotion = agreements_.promotion();
  for (const auto& [id, member] : waiting_) promise.waiting.push_back(member);
  std::set<MemberPair> cut = cut_;
  for (const auto& [id, loss] : losses_) {
    if (loss == Loss::kUnreachable) cut.insert(std::minmax(self_.id, id));
  }
  promise.cut.assign(cut.begin(), cut.end());
  promise.absent.assign(absent_.begin(), absent_.end());
  promise.witness = witness_;
  promise.ready = ready_;
  promise.leaving = leaving_;
  return promise;
}

void ElasticCore::onPrepare(Effects& effects, const MemberId& from, const ElasticMessage& message) {
  highest_round_ = std::max(highest_round_, message.ballot.round);
  if (message.ballot < promised_) {
    ElasticMessage refusal = make(ElasticKind::kRefused);
    refusal.ballot = promised_;
    send(effects, from, std::move(refusal));
    return;
  }
  promised_ = message.ballot;
  wanted_ = true;  // whoever asks may die
  if (proposal_ && proposal_->ballot() < promised_) proposal_.reset();
  stop(effects);
  ElasticMessage answer = make(ElasticKind::kPromise);
  answer.ballot = message.ballot;
  answer.promise = promise();
  send(effects, from, std::move(answer));
}

void ElasticCore::onAccept(Effects& effects, const MemberId& from, const ElasticMessage& message) {
  if (message.view->number != view_.number + 1 || message.view->lineage != view_.lineage) return;
  if (!believes(effects, *message.view)) return;
  highest_round_ = std::max(highest_round_, message.ballot.round);
  ElasticMessage answer = make(ElasticKind::kAccepted);
  answer.ballot = message.ballot;
  if (message.ballot < promised_) {
    answer.kind = ElasticKind::kRefused;
    answer.ballot = promised_;
  } else {
    promised_ = message.ballot;
    if (proposal_ && proposal_->ballot() < promised_) proposal_.reset();
    accepted_ = {message.ballot, *message.view};
    stop(effects);
  }
  send(effects, from, std::move(answer));
}

// ---- as a proposer

ElasticEffects ElasticCore::want(uint64_t newer_than) {
  Effects effects;
  if (state_ == State::kJoining) return retry();
  if (state_ == State::kLeftOut || view_.number > newer_than) return effects;
  wanted_ = true;
  pursue(effects);
  return effects;
}

void ElasticCore::pursue(Effects& effects) {
  if (!wanted_ || proposal_ || (state_ != State::kActive && state_ != State::kStopped)) return;
  const std::optional<MemberId> proposer = proposerNow();
  if (!proposer) return;
  if (*proposer == self_.id) {
    propose(effects);
  } else {
    send(effects, *proposer, make(ElasticKind::kRequest));
  }
}

// Has it promised to a member that may still be at it?
bool ElasticCore::followsAnother() const {
  return !promised_.isZero() && promised_.proposer != self_.id &&
         !losses_.contains(promised_.proposer);
}

void ElasticCore::propose(Effects& effects) {
  if (state_ != State::kActive && state_ != State::kStopped) return;
  highest_round_ = std::max(highest_round_, promised_.round) + 1;
  promised_ = {highest_round_, self_.id};
  proposal_.emplace(view_, rules_, promised_, secretOf(view_.lineage, view_.number + 1));
  stop(effects);
  ElasticMessage message = make(ElasticKind::kPrepare);
  message.ballot = promised_;
  sendToMembers(effects, message);
  carryOut(effects, proposal_->promised(self_.id, promise(), gone()));
}

void ElasticCore::carryOut(Effects& effects, Proposal::Step step) {
  if (step.witness) effects.witness = std::move(step.witness);
  if (step.no_quorum) reportNoQuorum(effects);
  if (step.over) {
    proposal_.reset();
    return;
  }
  if (step.accept) {
    ElasticMessage message = make(ElasticKind::kAccept);
    message.ballot = proposal_->ballot();
    message.view = proposal_->value();
    sendToMembers(effects, message);
  }
  if (step.decided) {
    decide(effects);
  } else {
    acceptOwn(effects);
  }
}

// Last: so a value that a member dies over before it is decided binds nobody for this member's
// sake.
void ElasticCore::acceptOwn(Effects& effects) {
  if (proposal_->hasAccepted(self_.id) || !proposal_->needsOnly(self_.id)) return;
  accepted_ = {proposal_->ballot(), proposal_->value()};
  carryOut(effects, proposal_->accepted(self_.id));
}

void ElasticCore::decide(Effects& effects) {
  const View decided = proposal_->value();
  std::vector<MemberId> all = idsOf(view_.members);
  if (decided.has(self_.id)) {
    for (const MemberId& id : idsOf(decided.members)) {
      if (!view_.has(id)) all.push_back(id);
    }
  }
  tellView(effects, all, decided);
  adopt(effects, decided);
}

void ElasticCore::reportNoQuorum(Effects& effects) const {
  std::set<MemberId> possible;
  for (const Member& member : view_.members) {
    const auto loss = losses_.find(member.id);
    if (loss == losses_.end() || !isFinal(loss->second)) possible.insert(member.id);
  }
  // One that knows the next view has been decided may come back with it.
  const auto isDecided = [](const auto& loss) { return loss.second == Loss::kLeftOut; };
  const auto mayComeBack = [](const auto& loss) { return !isFinal(loss.second); };
  const bool may_be_told = std::any_of(losses_.begin(), losses_.end(), isDecided) &&
                           std::any_of(losses_.begin(), losses_.end(), mayComeBack);
  effects.hopeless = !may_be_told && !proposal_->couldDecide(possible);
  for (const Member& member : view_.members) {
    if (losses_.contains(member.id)) effects.no_quorum.push_back(member.id);
  }
}

ElasticEffects ElasticCore::witnessAnswered(const WitnessReply& reply) {
  Effects effects;
  if (!proposal_ || reply.lineage != view_.lineage || reply.number != view_.number + 1) {
    return effects;
  }
  const bool sound = (!reply.held || believes(effects, reply.held->view)) &&
                     (!reply.decided || believes(effects, *reply.decided));
  if (!sound) {  // whatever wrote that there: a store that holds it has no vote
    WitnessReply none = reply;
    none.has_vote = false;
    carryOut(effects, proposal_->witnessAnswered(none, gone()));
    return effects;
  }
  if (reply.held) highest_round_ = std::max(highest_round_, reply.held->ballot.round);
  carryOut(effects, proposal_->witnessAnswered(reply, gone()));
  return effects;
}

ElasticEffects ElasticCore::retry() {
  Effects effects;
  if (state_ == State::kLeftOut) return effects;
  if (state_ == State::kJoining) {
    if (!ready_) return effects;  // the others would wait for its user
    ElasticMessage message = make(ElasticKind::kJoin);
    message.members = {self_};
    for (const MemberId& contact : contacts_) send(effects, contact, message);
    return effects;
  }
  if (wanted_) ++fruitless_;
  if (!proposal_) {
    pursue(effects);
  } else if (hasLostAcceptors()) {
    propose(effects);
  } else {
    repeatProposal(effects);
  }
  return effects;
}

ElasticEffects ElasticCore::askAgain() {
  Effects effects;
  if (state_ != State::kActive) return effects;
  const std::set<MemberId> lost = gone();
  const bool awaits_lost = std::any_of(losses_.begin(), losses_.end(), [&](const auto& loss) {
    return !isGoneForGood(loss.first) && agreements_.awaits(loss.first) &&
           agreements_.mayPassOn(loss.first, lost);
  });
  std::vector<MemberId> living;
  for (const Member& member : view_.members) {
    if (member.id == self_.id || isGoneForGood(member.id)) continue;
    if (!losses_.contains(member.id)) living.push_back(member.id);
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
  const bool in_view = state_ == State::kActive || state_ == State::kStopped;
  if (in_view && view_.has(id)) repeatTo(effects, id);
  return effects;
}

// Is it asked to accept by a proposal that cannot end as it began?
bool ElasticCore::hasLostAcceptors() const {
  return proposal_->stage() == Proposal::Stage::kAccepting &&
         std::any_of(view_.members.begin(), view_.members.end(), [&](const Member& member) {
           return losses_.contains(member.id) && proposal_->hasPromised(member.id) &&
                  !proposal_->hasAccepted(member.id);
         });
}

void ElasticCore::repeatProposal(Effects& effects) {
  effects.witness = proposal_->pendingRequest();
  const bool accepting = proposal_->stage() == Proposal::Stage::kAccepting;
  ElasticMessage message = make(accepting ? ElasticKind::kAccept : ElasticKind::kPrepare);
  message.ballot = proposal_->ballot();
  if (accepting) message.view = proposal_->value();
  for (const Member& member : view_.members) {
    const bool answered =
        accepting ? proposal_->hasAccepted(member.id) : proposal_->hasPromised(member.id);
    const auto loss = losses_.find(member.id);
    const bool dead = loss != losses_.end() && isFinal(loss->second);
    if (!answered && !dead) send(effects, member.id, message);
  }
  if (!accepting) carryOut(effects, proposal_->lookAgain(gone()));
}

// ---- the next view

void ElasticCore::hearView(Effects& effects, const MemberId& from, const View& view) {
  if (state_ == State::kLeftOut || (state_ != State::kJoining && view.number <= view_.number)) {
    return;  // it is known
  }
  View whole = view;
  // Whoever tells it may not be in it, and so not know the secret; this member has accepted it.
  if (view.secret.isZero() && accepted_ && isSecretOf(accepted_->view.secret, view)) {
    whole.secret = accepted_->view.secret;
  }
  effects.refused = objection(whole, from, whole.has(self_.id));
  if (effects.refused.empty()) {
    adopt(effects, whole);
    tellNewcomers(effects);
  } else if (isDecidedWithout(whole, from)) {
    // Its secret is all that is missing. Who told it does not know that, and will not promise any
    // more: it must not be waited for.
    effects = lose(from, Loss::kLeftOut);
  }
}

// Whoever decided on the view may not be in it. So the first of those who went on tells them; one
// of them that takes part elsewhere by now answers so.
void ElasticCore::tellNewcomers(Effects& effects) const {
  if (state_ != State::kActive) return;
  const auto isNew = [&](const Member& member) { return member.since == view_.number; };
  const auto first = std::find_if_not(view_.members.begin(), view_.members.end(), isNew);
  if (first == view_.members.end() || first->id != self_.id) return;
  std::vector<MemberId> newcomers;
  for (const Member& member : view_.members) {
    if (isNew(member)) newcomers.push_back(member.id);
  }
  tellView(effects, newcomers, view_);
}

// Is it the next view, but for its secret, and one that this member of the present view is not in?
bool ElasticCore::isDecidedWithout(const View& view, const MemberId& id) const {
  return state_ != State::kJoining && view.number == view_.number + 1 && view_.has(id) &&
         !view.has(id) && objection(view, id, /*needs_secret=*/false).empty();
}

// A newcomer knows nothing to judge it by but the view itself.
std::string ElasticCore::objection(const View& view, const MemberId& teller,
                                   bool needs_secret) const {
  const bool next = state_ != State::kJoining && view.lineage == view_.lineage;
  std::string found = next ? objectionToSuccessor(view, view_, teller) : objectionTo(view);
  // By a secret of nothing anybody could seal what comes after it.
  const bool has_one = next ? !view_.secret.isZero() : !view.secret_digest.isZero();
  if (found.empty() && needs_secret && has_one && view.secret.isZero()) {
    found = "it comes without its members' secret";
  }
  return found.empty() ? found : "view " + std::to_string(view.number) + ": " + found;
}

// Of a value for the next view, as a member or the store has it. Who takes it up tells its members
// its secret.
bool ElasticCore::believes(Effects& effects, const View& value) const {
  const bool next = !isApart(value.lineage) && value.number == view_.number + 1;  // is sealed
  effects.refused = next ? objection(value, self_.id, /*needs_secret=*/true)
                         : "view " + std::to_string(value.number) + ": it is not the next one";
  return effects.refused.empty();
}

void ElasticCore::adopt(Effects& effects, const View& view) {
  const bool first = state_ == State::kJoining;
  if (state_ == State::kLeftOut) return;
  if (!first && (isApart(view.lineage) || view.number <= view_.number)) return;
  if (first && !view.has(self_.id)) {
    contacts_ = idsOf(view.members);
    return;
  }
  // Who goes on has promised in the view before, so it knows that one: a member that missed one has
  // been left out of it, whoever lists it again by an old word.
  const bool missed_one = !first && view.number > view_.number + 1;
  const std::vector<MemberId> others = idsOf(view_.members);
  install(effects, view);
  if (!view_.has(self_.id) || missed_one) {
    state_ = State::kLeftOut;
    unsealed_ = missed_one;
    effects.left_out = true;
    unanswered_.reset();  // what became of it is not known here
    // Whoever decided on it may die before others have heard of it.
    if (!unsealed_) tellView(effects, others, view_);
    return;
  }
  state_ = State::kActive;
  answerFromView(effects);
  if (hasLostMembers()) {  // it cannot form
    wanted_ = true;
    pursue(effects);
  }
}

void ElasticCore::install(Effects& effects, const View& view) {
  if (state_ == State::kActive) effects.stopped = true;
  lost_before_ = losses_;
  std::erase_if(lost_before_,
                [&](const auto& loss) { return !view_.has(loss.first) || view.has(loss.first); });
  view_ = view;
  forgetOldView();
  agreements_ = makeAgreements();
  effects.new_view = true;
  constexpr size_t kRemembered = 16;
  known_.insert(known_.end(), view_.outcomes.begin(), view_.outcomes.end());
  if (known_.size() > kRemembered) {
    known_.erase(known_.begin(), known_.end() - static_cast<std::ptrdiff_t>(kRemembered));
  }
}

void ElasticCore::forgetOldView() {
  proposal_.reset();
  promised_ = {};
  accepted_.reset();
  highest_round_ = 0;
  fruitless_ = 0;
  questions_ = 0;
  wanted_ = false;
  cut_.clear();
  absent_.clear();
  contacts_.clear();
  for (const Member& member : view_.members) {
    waiting_.erase(member.id);
    // Who is in it has promised since: what was thought of it is out of date, but for its end.
    const auto loss = losses_.find(member.id);
    if (loss == losses_.end()) continue;
    if (!isFinal(loss->second) || loss->second == Loss::kLeftOut) losses_.erase(loss);
  }
  std::erase_if(losses_, [&](const auto& loss) {
    return !view_.has(loss.first) && !waiting_.contains(loss.first);
  });
}

// What this member alone knows decides; the store's register is the old lineage's.
ElasticEffects ElasticCore::beginLineage(const Lineage& lineage) {
  Effects effects;
  if (state_ != State::kActive && state_ != State::kStopped) return effects;
  sendToMembers(effects, make(ElasticKind::kParted));
  agreements_.stop();
  waiting_.clear();  // they asked the old lineage
  Promise own = promise();
  own.leaving = false;
  View next = nextView(view_, {{self_.id, std::move(own)}}, {}, rules_.max_size);
  next.lineage = lineage;
  next.witness = {};
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
  writer.u32(static_cast<uint32_t>(losses_.size()));
  for (const auto& [id, loss] : losses_) {
    writer.raw(id.bytes);
    writer.u8(static_cast<uint8_t>(loss));
  }
  ids(waiting());
  writer.raw(witness_.bytes);
  writer.raw(seed_.bytes);
  for (const auto& [one, other] : cut_) {
    writer.raw(one.bytes);
    writer.raw(other.bytes);
  }
  ids(absent_);
  writer.u8(static_cast<uint8_t>((leaving_ ? 1 : 0) | (wanted_ ? 2 : 0) | (ready_ ? 4 : 0) |
                                 (unsealed_ ? 8 : 0)));
  write(writer, AcceptedView{promised_, accepted_ ? accepted_->view : View{}});
  write(writer, AcceptedView{accepted_ ? accepted_->ballot : Ballot{}, View{}});
  writer.u32(highest_round_);
  writer.u32(fruitless_);
  writer.u32(static_cast<uint32_t>(questions_));
  writer.u8(proposal_ ? 1 : 0);
  if (proposal_) writer.text(proposal_->fingerprint());
  writer.text(agreements_.fingerprint());
  writer.u64(unanswered_ ? unanswered_->view : 0);
  writer.u64(unanswered_ ? unanswered_->index : 0);
  writer.u64(last_asked_.view);
  writer.u64(last_asked_.index);
  return writer.take();
}

}  // namespace torchft_ext

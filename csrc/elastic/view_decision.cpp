#include "elastic/view_decision.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "elastic/elastic_codec.h"
#include "elastic/quorum.h"

namespace torchft_ext {

// ---- whose turn it is

std::optional<MemberId> ViewDecision::proposer(const View& view, const Losses& losses) const {
  if (!wanted_ || proposal_) return std::nullopt;
  std::vector<MemberId> living;
  for (const Member& member : view.members) {
    if (!losses.has(member.id)) living.push_back(member.id);
  }
  if (living.empty()) return std::nullopt;
  return proposerInTurn(living, fruitless_);
}

bool ViewDecision::followsAnother(const MemberId& self, const Losses& losses) const {
  return !promised().isZero() && promised().proposer != self && !losses.has(promised().proposer);
}

// ---- as an acceptor

void ViewDecision::endBelow(const Ballot& ballot) {
  if (proposal_ && proposal_->ballot() < ballot) proposal_.reset();
}

bool ViewDecision::promise(const Ballot& ballot) {
  if (!acceptor_.promise(ballot)) return false;
  wanted_ = true;  // whoever asks may die
  endBelow(ballot);
  return true;
}

bool ViewDecision::accept(const Ballot& ballot, const View& value) {
  if (!acceptor_.accept(ballot, value)) return false;
  endBelow(ballot);
  return true;
}

void ViewDecision::refused(const Ballot& ballot) {
  acceptor_.hear(ballot.round);
  endBelow(ballot);
}

// ---- as the proposer

ViewDecision::Step ViewDecision::propose(Proposal proposal, const Promise& own,
                                         const Losses& losses) {
  proposal_ = std::move(proposal);
  Step step;
  ask(step, losses);
  follow(step, proposal_->promised(self(), own, losses.ids()), losses);
  return step;
}

ViewDecision::Step ViewDecision::promised(const MemberId& from, const Ballot& ballot,
                                          const Promise& promise, const Losses& losses) {
  Step step;
  if (proposal_ && proposal_->ballot() == ballot) {
    follow(step, proposal_->promised(from, promise, losses.ids()), losses);
  }
  return step;
}

ViewDecision::Step ViewDecision::accepted(const MemberId& from, const Ballot& ballot,
                                          const Losses& losses) {
  Step step;
  if (proposal_ && proposal_->ballot() == ballot) follow(step, proposal_->accepted(from), losses);
  return step;
}

ViewDecision::Step ViewDecision::witnessAnswered(const WitnessReply& reply, const Losses& losses) {
  Step step;
  if (!proposal_) return step;
  if (reply.held) acceptor_.hear(reply.held->ballot.round);
  follow(step, proposal_->witnessAnswered(reply, losses.ids()), losses);
  return step;
}

ViewDecision::Step ViewDecision::lookAgain(const Losses& losses) {
  Step step;
  if (proposal_) follow(step, proposal_->lookAgain(losses.ids()), losses);
  return step;
}

ViewDecision::Step ViewDecision::repeat(const Losses& losses) {
  Step step;
  if (!proposal_) return step;
  step.witness = proposal_->pendingRequest();
  ask(step, losses);
  if (!isAccepting()) follow(step, proposal_->lookAgain(losses.ids()), losses);
  return step;
}

bool ViewDecision::hasLostAcceptors(const Losses& losses) const {
  if (!proposal_ || !isAccepting()) return false;
  const std::vector<Member>& members = proposal_->base().members;
  return std::any_of(members.begin(), members.end(), [&](const Member& member) {
    return losses.has(member.id) && proposal_->hasPromised(member.id) &&
           !proposal_->hasAccepted(member.id);
  });
}

void ViewDecision::follow(Step& step, Proposal::Step next, const Losses& losses) {
  if (next.witness) step.witness = std::move(next.witness);
  if (next.no_quorum) reportNoQuorum(step, losses);
  if (next.over) {
    proposal_.reset();
    return;
  }
  if (next.accept) ask(step, losses);
  if (next.decided) {
    step.decided = proposal_->value();
  } else {
    acceptOwn(step, losses);
  }
}

// Last: so a value that a member dies over before it is decided binds nobody for this member's
// sake.
void ViewDecision::acceptOwn(Step& step, const Losses& losses) {
  if (proposal_->hasAccepted(self()) || !proposal_->needsOnly(self())) return;
  acceptor_.accept(proposal_->ballot(), proposal_->value());
  follow(step, proposal_->accepted(self()), losses);
}

void ViewDecision::reportNoQuorum(Step& step, const Losses& losses) const {
  std::set<MemberId> possible;
  for (const Member& member : proposal_->base().members) {
    if (!losses.isGoneForGood(member.id)) possible.insert(member.id);
    if (losses.has(member.id)) step.no_quorum.push_back(member.id);
  }
  // One that knows the next view has been decided may come back with it.
  const auto isDecided = [](const auto& loss) { return tellsOfNextView(loss.second); };
  const auto mayComeBack = [](const auto& loss) { return !isFinal(loss.second); };
  const auto& all = losses.all();
  const bool may_be_told = std::any_of(all.begin(), all.end(), isDecided) &&
                           std::any_of(all.begin(), all.end(), mayComeBack);
  step.hopeless = !may_be_told && !proposal_->couldDecide(possible);
}

bool ViewDecision::isAccepting() const {
  return proposal_->stage() == Proposal::Stage::kAccepting;
}

ElasticMessage ViewDecision::question() const {
  ElasticMessage message;
  message.kind = isAccepting() ? ElasticKind::kAccept : ElasticKind::kPrepare;
  message.lineage = proposal_->base().lineage;
  message.number = proposal_->base().number;
  message.ballot = proposal_->ballot();
  if (isAccepting()) message.view = proposal_->value();
  return message;
}

// The others that may live and have not answered yet.
void ViewDecision::ask(Step& step, const Losses& losses) const {
  const auto shared = std::make_shared<const ElasticMessage>(question());
  for (const Member& member : proposal_->base().members) {
    const bool answered =
        isAccepting() ? proposal_->hasAccepted(member.id) : proposal_->hasPromised(member.id);
    if (answered || member.id == self() || losses.isGoneForGood(member.id)) continue;
    step.sends.push_back({member.id, shared});
  }
}

std::string ViewDecision::fingerprint() const {
  ByteWriter writer;
  const auto& value = accepted();
  write(writer, AcceptedView{promised(), value ? value->view : View{}});
  write(writer, AcceptedView{value ? value->ballot : Ballot{}, View{}});
  writer.u32(acceptor_.highestRound());
  writer.u32(fruitless_);
  writer.u8(static_cast<uint8_t>((wanted_ ? 1 : 0) | (proposal_ ? 2 : 0)));
  if (proposal_) writer.text(proposal_->fingerprint());
  return writer.take();
}

}  // namespace torchft_ext

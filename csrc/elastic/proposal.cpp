#include "elastic/proposal.h"

#include <algorithm>

#include "elastic/elastic_codec.h"
#include "elastic/next_view.h"
#include "elastic/view_check.h"

namespace torchft_ext {
namespace {

Proposal::Step withoutQuorum() {
  Proposal::Step step;
  step.no_quorum = true;
  return step;
}

}  // namespace

Proposal::Step Proposal::promised(const MemberId& from, const Promise& promise,
                                  const std::set<MemberId>& gone) {
  if (stage_ != Stage::kPreparing || !base_.has(from)) return {};
  promises_.try_emplace(from, promise);
  return afterPromises(gone);
}

Proposal::Step Proposal::lookAgain(const std::set<MemberId>& gone) {
  return stage_ == Stage::kPreparing ? afterPromises(gone) : Step{};
}

Proposal::Step Proposal::afterPromises(const std::set<MemberId>& gone) {
  for (const Member& member : base_.members) {
    if (!promises_.contains(member.id) && !gone.contains(member.id)) return {};
  }
  std::set<MemberId> voices;
  for (const auto& [member, promise] : promises_) voices.insert(member);
  if (storeDecides()) {
    if (!enoughForStore(voices)) {  // who wrote a decision there may be gone
      Step step = withoutQuorum();
      step.witness = ask(WitnessRequest::What::kRead).witness;
      return step;
    }
    choose(gone);
    stage_ = Stage::kDeciding;
    return ask(WitnessRequest::What::kDecide);
  }
  switch (quorum(voices)) {
    case QuorumState::kNone:
      return withoutQuorum();
    case QuorumState::kWithWitness:
      if (!rules_.parts.witness_first) break;
      stage_ = Stage::kReading;
      return ask(WitnessRequest::What::kRead);
    case QuorumState::kWhole:
      break;
  }
  choose(gone);
  return startAccepting();
}

std::vector<std::vector<MemberId>> Proposal::acceptors() const {
  if (!rules_.parts.learners_watch) return acceptorSets(base_, {Promotion::kYes});
  std::vector<Promotion> promotions;
  promotions.reserve(promises_.size());
  for (const auto& [member, promise] : promises_) promotions.push_back(promise.promotion);
  return acceptorSets(base_, promotions);
}

QuorumState Proposal::quorum(const std::set<MemberId>& voices) const {
  return quorumOf(acceptors(), voices, !base_.witness.isZero());
}

bool Proposal::couldDecide(const std::set<MemberId>& voices) const {
  if (storeDecides()) return enoughForStore(voices) || !store_is_empty_;
  return quorum(voices) != QuorumState::kNone;
}

// Of each set of acceptors min_size, or all where it is smaller: who has no state decides nothing.
bool Proposal::enoughForStore(const std::set<MemberId>& voices) const {
  const std::vector<std::vector<MemberId>> sets = acceptors();
  return std::all_of(sets.begin(), sets.end(), [&](const std::vector<MemberId>& set) {
    const auto present = static_cast<size_t>(std::count_if(
        set.begin(), set.end(), [&](const MemberId& id) { return voices.contains(id); }));
    return present >= std::min(set.size(), static_cast<size_t>(std::max(rules_.min_size, 1)));
  });
}

void Proposal::choose(const std::set<MemberId>& gone) {
  const AcceptedView* binding = held_ ? &*held_ : nullptr;
  for (const auto& [member, promise] : promises_) {
    if (promise.accepted && (binding == nullptr || promise.accepted->ballot > binding->ballot)) {
      binding = &*promise.accepted;
    }
  }
  if (binding != nullptr) {
    value_ = binding->view;
    return;
  }
  value_ = nextView(base_, promises_, gone, rules_);
  setSecret(*value_, secret_);
  value_->store_decided = storeDecides() || stage_ != Stage::kPreparing;
  if (!base_.secret.isZero()) value_->seal = sealOf(*value_, base_.secret);
}

Proposal::Step Proposal::ask(WitnessRequest::What what) const {
  Step step;
  WitnessRequest request;
  request.what = what;
  request.lineage = base_.lineage;
  request.number = base_.number + 1;
  request.identity = base_.witness;
  request.ballot = ballot_;
  request.expected = held_;
  if (what != WitnessRequest::What::kRead) request.view = value_;
  step.witness = std::move(request);
  return step;
}

std::optional<WitnessRequest> Proposal::pendingRequest() const {
  switch (stage_) {
    case Stage::kReading:
      return ask(WitnessRequest::What::kRead).witness;
    case Stage::kClaiming:
      return ask(WitnessRequest::What::kClaim).witness;
    case Stage::kDeciding:
      return ask(WitnessRequest::What::kDecide).witness;
    default:
      return std::nullopt;
  }
}

Proposal::Step Proposal::startAccepting() {
  stage_ = Stage::kAccepting;
  Step step;
  step.accept = true;
  return step;
}

Proposal::Step Proposal::witnessAnswered(const WitnessReply& reply,
                                         const std::set<MemberId>& gone) {
  if (reply.ballot != ballot_ || reply.lineage != base_.lineage ||
      reply.number != base_.number + 1) {
    return {};
  }
  if (storeDecides()) return storeAnswered(reply);
  const bool reading = stage_ == Stage::kReading && reply.what == WitnessRequest::What::kRead;
  const bool claiming = stage_ == Stage::kClaiming && reply.what == WitnessRequest::What::kClaim;
  if (!reading && !claiming) return {};
  if (!reply.has_vote) return witnessHasNoVote();
  if (claiming && reply.claimed) {
    witness_claimed_ = true;
    Step step;
    step.decided = !rules_.parts.witness_first;
    return step.decided ? step : startAccepting();
  }
  if (reply.held && reply.held->ballot > ballot_) {
    Step step;
    step.over = true;
    return step;
  }
  held_ = reply.held;
  choose(gone);
  stage_ = Stage::kClaiming;
  return ask(WitnessRequest::What::kClaim);
}

Proposal::Step Proposal::storeAnswered(const WitnessReply& reply) {
  if (stage_ == Stage::kDeciding) {
    return reply.what == WitnessRequest::What::kDecide ? storeDecided(reply) : Step{};
  }
  if (stage_ != Stage::kPreparing || reply.what != WitnessRequest::What::kRead) return {};
  store_is_empty_ = reply.has_vote && !reply.held;
  if (!reply.has_vote || store_is_empty_) return withoutQuorum();
  value_ = reply.held->view;
  Step step;
  step.decided = true;
  return step;
}

Proposal::Step Proposal::storeDecided(const WitnessReply& reply) {
  if (!reply.has_vote || !reply.decided) {
    Step step = withoutQuorum();
    step.over = true;  // the value may stand there, or come to stand there
    return step;
  }
  value_ = reply.decided;
  Step step;
  step.decided = true;
  return step;
}

// A member that comes back may make a quorum without it; but a claim may have got through, and a
// ballot has one value.
Proposal::Step Proposal::witnessHasNoVote() {
  Step step = withoutQuorum();
  step.over = stage_ == Stage::kClaiming;
  stage_ = Stage::kPreparing;
  return step;
}

bool Proposal::isQuorum(const std::set<MemberId>& voices) const {
  const QuorumState state = quorum(voices);
  return state == QuorumState::kWhole || (state == QuorumState::kWithWitness && witness_claimed_);
}

bool Proposal::needsOnly(const MemberId& own) const {
  std::set<MemberId> voices = accepted_by_;
  voices.insert(own);
  return stage_ == Stage::kAccepting && quorum(voices) != QuorumState::kNone &&
         (isQuorum(voices) || !rules_.parts.witness_first);
}

Proposal::Step Proposal::accepted(const MemberId& from) {
  if (stage_ != Stage::kAccepting || !base_.has(from)) return {};
  accepted_by_.insert(from);
  if (!rules_.parts.witness_first && quorum(accepted_by_) == QuorumState::kWithWitness) {
    stage_ = Stage::kReading;
    return ask(WitnessRequest::What::kRead);
  }
  Step step;
  step.decided = isQuorum(accepted_by_);
  return step;
}

std::string Proposal::fingerprint() const {
  ByteWriter writer;
  writer.u8(static_cast<uint8_t>(stage_));
  write(writer, AcceptedView{ballot_, value_ ? *value_ : View{}});
  for (const auto& [member, promise] : promises_) {
    writer.raw(member.bytes);
    ElasticMessage message;
    message.kind = ElasticKind::kPromise;
    message.promise = promise;
    writer.text(encodeElasticMessage(message));
  }
  writer.u32(static_cast<uint32_t>(accepted_by_.size()));
  for (const MemberId& member : accepted_by_) writer.raw(member.bytes);
  write(writer, held_ ? *held_ : AcceptedView{});
  writer.u8(static_cast<uint8_t>((witness_claimed_ ? 1 : 0) | (store_is_empty_ ? 2 : 0)));
  return writer.take();
}

}  // namespace torchft_ext

#include "elastic_world_store.h"

namespace torchft_ext {

WitnessReply ElasticWorldStore::answer(const WitnessRequest& request) {
  WitnessReply reply;
  reply.what = request.what;
  reply.lineage = request.lineage;
  reply.number = request.number;
  reply.ballot = request.ballot;
  if (lost_) return reply;
  // The store is the first lineage's: a view of another one names none.
  const bool own = request.lineage.bytes[0] == 1;
  reply.has_vote =
      (store_rule_ && own) || request.identity.bytes[0] == identity_ || !witness_is_the_views_;
  if (store_rule_ && !own) return reply;
  if (request.what == WitnessRequest::What::kDecide) {
    reply.decided = decided_.try_emplace(request.number, *request.view).first->second;
    return reply;
  }
  if (held_ && held_->view.number > request.number) reply.has_vote = false;
  std::optional<AcceptedView> held;  // of this number
  if (held_ && held_->view.number == request.number) held = held_;
  if (request.what == WitnessRequest::What::kClaim && reply.has_vote && held == request.expected) {
    held_ = {request.ballot, *request.view};
    reply.claimed = true;
  }
  reply.held = held;
  return reply;
}

void ElasticWorldStore::restart() {
  ++identity_;
  held_.reset();
}

std::vector<View> ElasticWorldStore::binding() const {
  std::vector<View> views;
  for (const auto& [number, view] : decided_) views.push_back(view);
  if (held_) views.push_back(held_->view);
  return views;
}

void ElasticWorldStore::write(ByteWriter& writer) const {
  writer.text(encodeAccepted(held_ ? *held_ : AcceptedView{}));
  for (const auto& [number, view] : decided_) writer.text(encodeView(view));
  writer.u8(identity_);
  writer.u8(lost_ ? 1 : 0);
}

}  // namespace torchft_ext

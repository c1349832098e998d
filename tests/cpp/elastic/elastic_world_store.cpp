#include "cpp/elastic/elastic_world_store.h"

namespace torchft_ext {

WitnessId ElasticWorldStore::identityTo(LineageNumber lineage) const {
  WitnessId identity;
  identity.bytes[0] = identity_;
  identity.bytes[1] = static_cast<uint8_t>(lineage - 1);
  return identity;
}

void ElasticWorldStore::restart() {
  ++identity_;
  held_.clear();
}

WitnessReply ElasticWorldStore::answer(const WitnessRequest& request) {
  WitnessReply reply;
  reply.what = request.what;
  reply.lineage = request.lineage;
  reply.number = request.number;
  reply.ballot = request.ballot;
  if (is_lost_) return reply;
  const LineageNumber lineage = numberOf(request.lineage);
  const bool is_known = request.identity == identityTo(lineage);
  const auto found = held_.find(lineage);
  const uint64_t last = found == held_.end() ? 0 : found->second.view.number;
  reply.has_vote = last <= request.number && (is_known || !knows_identities_);
  if (last == request.number) reply.held = found->second;
  if (last > request.number && is_known) reply.later = found->second.view;
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

}  // namespace torchft_ext

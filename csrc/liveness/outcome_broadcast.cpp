#include "liveness/outcome_broadcast.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "liveness/overlay.h"

namespace torchft_ext {

OutcomeBroadcast::OutcomeBroadcast(BroadcastOrders& orders, uint64_t watch, int self_rank,
                                   Notice outcome)
    : orders_(orders), watch_(watch), self_rank_(self_rank), outcome_(std::move(outcome)) {}

void OutcomeBroadcast::begin(Time now, const std::vector<std::pair<int, Incarnation>>& members,
                             const std::set<Incarnation>& neighbours,
                             const std::set<Incarnation>& settled) {
  give_up_at_ = now + kKeptFor;
  present_.insert(members.begin(), members.end());
  settled_ = settled;
  for (const auto& [rank, member] : members) {
    const bool told = orders_.send(member, outcome_) && !isFailure();
    const bool counts_on_us = neighbours.count(member) > 0 && settled.count(member) == 0;
    if (counts_on_us && !told) untold_.insert(member);
  }
  closeRanks();
}

void OutcomeBroadcast::closeRanks() {
  if (!isFailure()) return;
  std::vector<int> ranks{self_rank_};
  for (const auto& [rank, member] : present_) ranks.push_back(rank);
  std::sort(ranks.begin(), ranks.end());
  for (const int rank : overlayNeighbours(self_rank_, ranks)) {
    const Incarnation& member = present_.at(rank);
    if (settled_.count(member) > 0 || !untold_.insert(member).second) continue;
    kept_.insert(member);
    orders_.keepConnection(watch_, member);
  }
}

bool OutcomeBroadcast::keep(const Incarnation& peer) {
  return untold_.count(peer) > 0 && kept_.insert(peer).second;
}

void OutcomeBroadcast::connectionUp(const Incarnation& peer) {
  if (untold_.count(peer) == 0 || asked_.count(peer) > 0) return;
  if (!orders_.send(peer, outcome_)) return;
  if (!isFailure()) return release(peer);
  asked_.insert(peer);
  Notice question;
  question.type = Notice::Type::kAsk;
  question.generation = outcome_.generation;
  orders_.send(peer, question);
}

void OutcomeBroadcast::settle(const Incarnation& peer) {
  settled_.insert(peer);
  release(peer);
}

void OutcomeBroadcast::left(Time now, int rank) {
  const auto member = present_.find(rank);
  if (member == present_.end() || settled_.count(member->second) > 0) return;
  release(member->second);
  present_.erase(member);
  if (isFailure() && !close_at_) close_at_ = now + kCloseAfter;
}

void OutcomeBroadcast::left(Time now, const Incarnation& peer) {
  const auto member = std::find_if(present_.begin(), present_.end(),
                                   [&](const auto& entry) { return entry.second == peer; });
  if (member != present_.end()) left(now, member->first);
}

void OutcomeBroadcast::tick(Time now) {
  if (close_at_ && *close_at_ <= now) {
    close_at_.reset();
    closeRanks();
  }
  if (now < give_up_at_) return;
  close_at_.reset();
  present_.clear();
  while (!untold_.empty()) release(*untold_.begin());
}

std::optional<OutcomeBroadcast::Time> OutcomeBroadcast::nextDue() const {
  if (isDone()) return std::nullopt;
  return close_at_ ? std::min(*close_at_, give_up_at_) : give_up_at_;
}

void OutcomeBroadcast::release(const Incarnation& peer) {
  const Incarnation id = peer;  // it may be the set's own
  untold_.erase(id);
  if (kept_.erase(id) > 0) orders_.dropConnection(watch_, id);
}

}  // namespace torchft_ext

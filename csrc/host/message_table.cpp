#include "host/message_table.h"

#include <algorithm>

namespace torchft_ext {
namespace {

// The queue whose front came first, among those of `candidates`.
template <typename Queues, typename Accepts>
typename Queues::iterator earliest(Queues& queues, Accepts accepts) {
  auto best = queues.end();
  for (auto it = queues.begin(); it != queues.end(); ++it) {
    if (!accepts(it->first)) continue;
    if (best == queues.end() || it->second.front().order < best->second.front().order) best = it;
  }
  return best;
}

template <typename Tags, typename Tag, typename Queue>
auto popFront(Tags& tags, Tag tag, Queue queue) {
  auto entry = std::move(queue->second.front().entry);
  queue->second.pop_front();
  if (queue->second.empty()) tag->second.erase(queue);
  if (tag->second.empty()) tags.erase(tag);
  return entry;
}

}  // namespace

std::optional<Announced> MessageTable::takeAnnouncedFor(const Operation& recv) {
  const auto tag = announcements_.find(recv.tag);
  if (tag == announcements_.end()) return std::nullopt;
  const auto queue = recv.peer == kAny ? earliest(tag->second, [](int) { return true; })
                                       : tag->second.find(recv.peer);
  if (queue == tag->second.end()) return std::nullopt;
  const Announced announced = popFront(announcements_, tag, queue);
  --announced_by_[announced.peer];
  return announced;
}

void MessageTable::post(PendingOp recv) {
  const int peer = recv.operation.peer;
  ++posted_;
  ++posted_for_[peer];
  auto& queue = posts_[recv.operation.tag][peer];
  queue.push_back({next_order_++, std::move(recv)});
}

std::optional<PendingOp> MessageTable::takePostedFor(const Announced& announced, uint64_t tag) {
  const auto found = posts_.find(tag);
  if (found == posts_.end()) return std::nullopt;
  const auto queue =
      earliest(found->second, [&](int peer) { return peer == kAny || peer == announced.peer; });
  if (queue == found->second.end()) return std::nullopt;
  --posted_;
  --posted_for_[queue->first];
  return popFront(posts_, found, queue);
}

void MessageTable::keep(const Announced& announced, uint64_t tag) {
  ++announced_by_[announced.peer];
  announcements_[tag][announced.peer].push_back({next_order_++, announced});
}

const PendingOp* MessageTable::findPosted(const OpState& op) const {
  for (const auto& [tag, queues] : posts_) {
    for (const auto& [peer, queue] : queues) {
      for (const auto& posted : queue) {
        if (posted.entry.state.get() == &op) return &posted.entry;
      }
    }
  }
  return nullptr;
}

size_t MessageTable::announcedBy(int peer) const {
  const auto found = announced_by_.find(peer);
  return found == announced_by_.end() ? 0 : found->second;
}

bool MessageTable::hasPostedFor(int peer) const {
  const auto found = posted_for_.find(peer);
  return found != posted_for_.end() && found->second > 0;
}

void MessageTable::forgetAnnouncedBy(int peer) {
  for (auto& [tag, queues] : announcements_) queues.erase(peer);
  std::erase_if(announcements_, [](const auto& entry) { return entry.second.empty(); });
  announced_by_.erase(peer);
}

std::vector<PendingOp> MessageTable::takeAllPosted() {
  std::vector<PendingOp> all;
  for (auto& [tag, queues] : posts_) {
    for (auto& [peer, queue] : queues) {
      for (auto& numbered : queue) all.push_back(std::move(numbered.entry));
    }
  }
  posts_.clear();
  posted_for_.clear();
  posted_ = 0;
  return all;
}

}  // namespace torchft_ext

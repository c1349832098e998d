#include "liveness/notice_cache.h"

#include <algorithm>

namespace torchft_ext {
namespace {

// The first failure of a generation is the one that counts; of leavers, each.
bool saysTheSame(const Notice& a, const Notice& b) {
  return a.generation == b.generation && a.type == b.type && a.rank == b.rank;
}

}  // namespace

void NoticeCache::keep(Time now, const Notice& notice) {
  expire(ahead_, now);
  if (outcomeOf(notice.generation) != nullptr) return;
  const bool known = std::any_of(ahead_.begin(), ahead_.end(), [&](const Entry& entry) {
    return saysTheSame(entry.notice, notice);
  });
  if (!known) add(ahead_, kMostAhead, now + kAheadFor, notice);
}

std::vector<Notice> NoticeCache::begin(Time now, const Nonce& generation) {
  expire(ahead_, now);
  expire(over_, now);
  std::vector<Notice> found;
  for (const Entry& entry : ahead_) {
    if (entry.notice.generation == generation) found.push_back(entry.notice);
  }
  std::erase_if(ahead_, [&](const Entry& entry) { return entry.notice.generation == generation; });
  return found;
}

void NoticeCache::end(Time now, const Notice& outcome) {
  expire(over_, now);
  add(over_, kMostOver, now + kOverFor, outcome);
}

const Notice* NoticeCache::outcomeOf(const Nonce& generation) const {
  const auto found = std::find_if(over_.begin(), over_.end(), [&](const Entry& entry) {
    return entry.notice.generation == generation;
  });
  return found == over_.end() ? nullptr : &found->notice;
}

void NoticeCache::add(Entries& entries, size_t most, Time until, const Notice& notice) {
  if (entries.size() >= most) entries.pop_front();
  entries.push_back({until, notice});
}

void NoticeCache::expire(Entries& entries, Time now) {
  while (!entries.empty() && entries.front().until <= now) entries.pop_front();
}

}  // namespace torchft_ext

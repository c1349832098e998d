#include "elastic/job_founder.h"

#include <utility>

namespace torchft_ext {
namespace {

constexpr milliseconds kBetweenLooks{10};
constexpr milliseconds kBetweenTries{100};  // to reach the store
constexpr int kLooksBeforeOthersFound = 50;

void pause(Deadline until, const Cancelled& cancelled) {
  Mutex mutex;
  CondVar never;
  const MutexLock lock(mutex);
  waitUntilDone(
      mutex, never, [] { return false; }, until, cancelled);
}

struct Look {
  std::optional<Founding> founding;
  size_t taken = 0;  // seats
};

Look lookAtStore(JobStore& store) {
  Look look{store.founding(), 0};
  if (!look.founding) look.taken = store.seatsTaken();
  return look;
}

Founding foundingOf(std::vector<Member> members, const ElasticRules& rules) {
  Founding founding;
  founding.rules = rules;
  founding.key = {Nonce::random(), GenerationSecret::random()};
  founding.view.lineage = Lineage::random();
  founding.view.number = 1;
  for (Member& member : members) {
    member.since = 1;
    founding.view.voters.push_back(member.id);
  }
  founding.view.members = std::move(members);
  return founding;
}

}  // namespace

std::optional<Founding> JobFounder::awaitStore(Deadline deadline,
                                               const Cancelled& cancelled) const {
  for (;;) {
    try {
      return store_.call([](JobStore& store) { return store.founding(); }, deadline, cancelled);
    } catch (const ElasticError&) {
      if (deadline.expired()) throw;
    }
    pause(deadline.orEarlier(kBetweenTries), cancelled);
  }
}

JobFounder::Place JobFounder::findPlace(const Member& self, Deadline deadline,
                                        const Cancelled& cancelled) const {
  Place place;
  place.founding = awaitFounding(self, deadline, cancelled);
  place.contacts = place.founding.view.members;
  if (place.founding.view.has(self.id)) return place;
  auto late = store_.call([](JobStore& store) { return store.contacts(); }, deadline, cancelled);
  if (!late.empty()) place.contacts = std::move(late);
  return place;
}

// Each look reads two keys, however many have come. Who has the last seat reads them all and
// founds; if nothing comes of that, the others do.
Founding JobFounder::awaitFounding(const Member& self, Deadline deadline,
                                   const Cancelled& cancelled) const {
  if (const auto known = awaitStore(deadline, cancelled)) return *known;
  const auto take = [self](JobStore& store) { return store.takeSeat(self); };
  const size_t seat = store_.call(take, deadline, cancelled);
  int patience = seat + 1 >= size_ ? 0 : kLooksBeforeOthersFound;
  for (;;) {
    const auto now = store_.call(lookAtStore, deadline, cancelled);
    if (now.founding) return *now.founding;
    if (now.taken >= size_ && patience-- <= 0) {
      if (const auto founding = found(deadline, cancelled)) return *founding;
    }
    if (deadline.expired()) throwTooFew(now.taken);
    pause(deadline.orEarlier(kBetweenLooks), cancelled);
  }
}

// Nothing: somebody died between coming and sitting down, so it takes one more.
std::optional<Founding> JobFounder::found(Deadline deadline, const Cancelled& cancelled) const {
  const auto found = [size = size_, rules = rules_](JobStore& store) {
    std::vector<Member> seats = store.seats(size);
    if (seats.size() < size) return std::optional<Founding>();
    return std::optional(store.found(foundingOf(std::move(seats), rules)));
  };
  return store_.call(found, deadline, cancelled);
}

void JobFounder::throwTooFew(size_t found) const {
  throw ElasticError(ElasticErrorKind::kTimeout,
                     "elastic.join: job '" + job_ + "': expected " + std::to_string(size_) +
                         " processes, found " + std::to_string(found) +
                         " by the deadline; start the others, or give a smaller size");
}

}  // namespace torchft_ext

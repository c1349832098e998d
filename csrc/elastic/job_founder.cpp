#include "elastic/job_founder.h"

#include <utility>

#include "base/log.h"
#include "elastic/job_over.h"
#include "elastic/view_check.h"

namespace torchft_ext {
namespace {

constexpr milliseconds kBetweenLooks{10};
constexpr milliseconds kBetweenTries{100};  // of a store that fails
constexpr int kLooksBeforeOthersFound = 50;
constexpr std::chrono::seconds kTellAfter{5};  // shorter waits are no news

void pause(Deadline until, const Cancelled& cancelled) {
  Mutex mutex;
  CondVar never;
  const MutexLock lock(mutex);
  waitUntilDone(
      mutex, never, [] { return false; }, until, cancelled);
}

struct Look {
  std::optional<Founding> founding;
  std::optional<size_t> seat;  // of this process
  size_t taken = 0;
};

Look look(JobStore& store, const Member& self, std::optional<size_t> seat) {
  Look found{store.founding(), seat, 0};
  if (found.founding) return found;
  if (!seat || !store.hasSeat(*seat, self)) found.seat = store.takeSeat(self);
  found.taken = store.seatsTaken();
  return found;
}

Founding foundingOf(std::vector<Member> members, const ElasticRules& rules) {
  Founding founding;
  founding.rules = rules;
  founding.key = {Nonce::random(), JobSecret::random()};
  founding.view.lineage = Lineage::random();
  founding.view.number = 1;
  setSecret(founding.view, ViewSecret::random());
  for (Member& member : members) {
    member.since = 1;
    founding.view.voters.push_back(member.id);
  }
  founding.view.members = std::move(members);
  return founding;
}

}  // namespace

JobFounder::Place JobFounder::findPlace(const Member& self, Deadline deadline,
                                        const Cancelled& cancelled) const {
  Place place;
  place.founding = awaitFounding(self, deadline, cancelled);
  place.contacts = place.founding.view.members;
  if (place.founding.view.has(self.id)) return place;
  const auto end =
      store_.call([founding = place.founding](JobStore& store) { return store.end(founding); },
                  deadline, cancelled);
  if (end) throw jobOver(job_, *end);
  auto late = store_.call([](JobStore& store) { return store.contacts(); }, deadline, cancelled);
  if (!late.empty()) place.contacts = std::move(late);
  return place;
}

// Each look reads three keys, however many have come. Who has the last seat reads them all and
// founds; if nothing comes of that, the others do. A store that fails may come back, or have
// another in its place, without this process's seat.
Founding JobFounder::awaitFounding(const Member& self, Deadline deadline,
                                   const Cancelled& cancelled) const {
  std::optional<size_t> seat;
  Look now;
  int patience = 0;
  std::optional<ElasticError> trouble;
  const Deadline tell = Deadline::after(kTellAfter);
  bool told = false;
  for (;;) {
    try {
      now = store_.call([self, seat](JobStore& store) { return look(store, self, seat); }, deadline,
                        cancelled);
      if (now.founding) return *now.founding;
      if (seat != now.seat) patience = *now.seat + 1 >= size_ ? 0 : kLooksBeforeOthersFound;
      seat = now.seat;
      if (now.taken >= size_ && patience-- <= 0) {
        if (const auto founding = found(deadline, cancelled)) return *founding;
      }
    } catch (const ElasticError& error) {  // of a try that was cut short the one before knows more
      if (!trouble || !deadline.expired()) trouble = error;
      pause(deadline.orEarlier(kBetweenTries), cancelled);
    }
    if (cancelled && cancelled()) leave(self, seat);
    if (!told && tell.expired()) tellWaiting(now.taken, trouble);
    told = tell.expired();
    if (deadline.expired() && now.taken == 0 && trouble) throw ElasticError(*trouble);
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

void JobFounder::tellWaiting(size_t come, const std::optional<ElasticError>& trouble) const {
  std::string line = "elastic job '" + job_ + "': waits for its founders: " + std::to_string(come) +
                     " of " + std::to_string(size_) + " processes have come";
  const std::string unanswered = unanswered_ ? unanswered_() : std::string();
  if (!unanswered.empty()) {
    line += "; of the listed members these do not answer: " + unanswered;
  } else if (come == 0 && trouble) {
    line += std::string("; ") + trouble->what();
  }
  log(LogLevel::kWarning, line);
}

void JobFounder::leave(const Member& self, std::optional<size_t> seat) const {
  constexpr std::chrono::milliseconds kToGiveUpSeat{300};
  const auto give_up = [self, seat](JobStore& store) {
    if (seat) store.giveUpSeat(*seat, self);
    return true;
  };
  try {
    store_.call(give_up, Deadline::after(kToGiveUpSeat), {});
  } catch (const ElasticError& error) {  // the others find a founder that is gone
    log(LogLevel::kInfo, "elastic job '" + job_ + "': a seat stays taken: " + error.what());
  }
  throw ElasticError(ElasticErrorKind::kLeftOut, "elastic.join: job '" + job_ +
                                                     "': this process was told to leave before "
                                                     "the job was founded: let it end");
}

void JobFounder::throwTooFew(size_t found) const {
  throw ElasticError(ElasticErrorKind::kTimeout,
                     "elastic.join: job '" + job_ + "': expected " + std::to_string(size_) +
                         " processes, found " + std::to_string(found) +
                         " by the deadline; start the others, or give a smaller size");
}

}  // namespace torchft_ext

#include "elastic/elastic_member.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/sole_copy.h"
#include "elastic/member_driver.h"

namespace torchft_ext {

std::shared_ptr<ElasticMember> ElasticMember::join(ElasticOptions options, Deadline deadline,
                                                   const Cancelled& cancelled) {
  requireSoleCopy();  // here, and not on a thread
  auto driver = std::make_shared<MemberDriver>(std::move(options));
  std::shared_ptr<ElasticMember> member(new ElasticMember(driver));
  driver->start(deadline, cancelled);
  return member;
}

ElasticMember::~ElasticMember() {
  if (forks_ != forkCount()) {  // its descriptors and loop are the parent's too
    driver_->keep_alive = driver_;
  } else if (driver_->status.leave()) {
    driver_->stop();
  }
}

void ElasticMember::requireOwnProcess() const {
  if (forks_ == forkCount()) return;
  throw ElasticError(ElasticErrorKind::kState,
                     "elastic: this member belongs to the process that forked this one: join here");
}

MemberId ElasticMember::id() const {
  requireOwnProcess();
  return driver_->status.self().id;
}

View ElasticMember::view() const {
  requireOwnProcess();
  return driver_->status.view();
}

std::vector<std::string> ElasticMember::waiting() const {
  requireOwnProcess();
  return driver_->status.waiting();
}

ElasticRules ElasticMember::rules() const {
  return driver_->status.rules();
}

std::string ElasticMember::nameOf(const MemberId& id) const {
  return driver_->status.nameOf(id);
}

std::vector<MemberId> ElasticMember::leftOutSince(const View& view) const {
  return driver_->status.leftOutSince(view);
}

View ElasticMember::goOnAlone(Deadline deadline, const Cancelled& cancelled) {
  requireOwnProcess();
  const uint64_t last = driver_->status.view().number;
  driver_->loop.post([driver = driver_] {
    if (!driver->core) return;
    driver->core->setReady(true);
    driver->carryOut(driver->core->beginLineage(Lineage::random()));
  });
  return driver_->status.awaitView(last, deadline, cancelled, /*without_quorum=*/true);
}

View ElasticMember::awaitView(uint64_t newer_than, Deadline deadline, const Cancelled& cancelled,
                              const std::set<MemberPair>& unreachable,
                              const std::set<MemberId>& leave_out) {
  requireOwnProcess();
  want(newer_than, unreachable, leave_out);
  View view = driver_->status.awaitView(newer_than, deadline, cancelled);
  while (driver_->status.isLeaving()) {  // it was decided on before all knew that
    want(view.number, {}, {});
    view = driver_->status.awaitView(view.number, deadline, cancelled);
  }
  return view;
}

void ElasticMember::want(uint64_t newer_than, const std::set<MemberPair>& unreachable,
                         const std::set<MemberId>& leave_out) {
  driver_->loop.post([driver = driver_, newer_than, unreachable, leave_out] {
    if (!driver->core) return;
    driver->core->setReady(true);
    driver->noteCut(unreachable);
    if (driver->core->view().number > newer_than) return;
    driver->core->cannotReach(unreachable);
    driver->core->leaveOut(leave_out);
    driver->carryOut(driver->core->want(newer_than));
  });
}

void ElasticMember::endView(uint64_t view) {
  driver_->loop.post([driver = driver_, view] {
    driver->loop.runAt(Clock::now() + MemberDriver::kTick, [weak = std::weak_ptr(driver), view] {
      const auto alive = weak.lock();
      if (alive && alive->core) alive->carryOut(alive->core->want(view));
    });
  });
}

void ElasticMember::suspect(const std::map<MemberId, std::string>& lost) {
  driver_->status.setHow(lost);
  driver_->loop.post([driver = driver_, lost] {
    if (!driver->core) return;
    for (const auto& [id, how] : lost) {
      if (!driver->core->view().has(id) || id == driver->core->self().id) continue;
      driver->network->ask(id);
      // Of a sole holder the answer decides: it may be dead.
      if (!driver->sole_holders.has(id)) driver->lose(id, Loss::kFrozen);
    }
  });
}

void ElasticMember::setReady(bool ready) {
  driver_->loop.post([driver = driver_, ready] {
    if (driver->core) driver->core->setReady(ready);
  });
}

void ElasticMember::setShard(std::optional<uint32_t> shard) {
  driver_->loop.post([driver = driver_, shard] {
    if (driver->core) driver->core->setShard(shard);
  });
}

void ElasticMember::setSoleHolders(const std::set<MemberId>& ids, Duration patience) {
  driver_->loop.post(
      [driver = driver_, ids, patience] { driver->sole_holders.set(ids, patience); });
}

void ElasticMember::watchForming(bool forming) {
  driver_->loop.post([driver = driver_, forming] { driver->watchForming(forming); });
}

bool ElasticMember::isOver(uint64_t view) const {
  requireOwnProcess();
  return driver_->status.isOver(view);
}

void ElasticMember::noteSteps(uint64_t committed) {
  driver_->status.noteSteps(committed);
}

void ElasticMember::notePhases(uint64_t view,
                               const std::vector<std::pair<std::string, Duration>>& phases) {
  driver_->status.notePhases(view, phases);
}

static void checkDigest(const VoteDigest& digest) {
  for (const std::string* part : {&digest.common, &digest.of_shard}) {
    if (part->size() > kLongestDigest) {
      throw std::invalid_argument("agree: digest: expected parts of " +
                                  std::to_string(kLongestDigest) + " bytes at most, found " +
                                  std::to_string(part->size()));
    }
  }
}

Answer ElasticMember::agree(uint64_t view, Vote vote, Deadline deadline,
                            const Cancelled& cancelled) {
  requireOwnProcess();
  driver_->status.checkNote(vote.note);
  checkDigest(vote.digest);
  const MemberStatus::Agreement agreement = driver_->status.beginAgreement(view);
  if (agreement.fresh) {
    driver_->loop.post([driver = driver_, view, vote = std::move(vote)] {
      if (driver->core) driver->carryOut(driver->core->agree(view, vote));
    });
  }
  return driver_->status.awaitAnswer(agreement, deadline, cancelled);
}

void ElasticMember::setLeaving() {
  driver_->status.setLeaving();
  driver_->loop.post([driver = driver_] {
    if (driver->core) driver->core->setLeaving();
  });
}

bool ElasticMember::recordEnd(Deadline deadline, const Cancelled& cancelled) {
  requireOwnProcess();
  const auto founding = std::make_shared<Founding>();
  const View last = driver_->status.view();
  const JobEnd end{std::chrono::system_clock::now(), static_cast<uint32_t>(last.members.size())};
  const auto tell_clients = [driver = driver_, founding, end] {
    *founding = driver->founding;
    if (driver->place) driver->place->put(keyOfEnd(*founding), encodeEnd(end));
  };
  if (!driver_->loop.runOnLoop(tell_clients, deadline) || !driver_->options.store) return false;
  const auto record = [founding, last, end](JobStore& store) {
    return store.recordEnd(*founding, last, end);
  };
  try {
    return driver_->store.call(record, deadline, cancelled);
  } catch (const ElasticError& error) {
    log(LogLevel::kWarning,
        "elastic job '" + driver_->options.job +
            "': its end is not on record for processes that come later: " + error.what());
    return false;
  }
}

bool ElasticMember::leave(Deadline deadline) {
  if (forks_ != forkCount() || !driver_->status.leave()) return true;
  const auto driver = driver_;  // what runs late on the loop has it too
  driver->loop.post([driver] {
    if (driver->core) driver->core->setLeaving();
    if (driver->network) driver->network->sayGoodbye();
  });
  const auto isFree = [driver] { return !driver->network || !driver->isNeeded(); };
  const bool free = driver->untilOnLoop(isFree, deadline);
  driver->loop.post([driver] {
    if (driver->network) driver->network->finish();
  });
  driver->untilOnLoop([driver] { return !driver->network || driver->network->finished(); },
                      deadline);
  driver->stop();
  return free;
}

StoreAnswer ElasticMember::callStore(StoreCall call, Deadline deadline,
                                     const Cancelled& cancelled) {
  requireOwnProcess();
  return driver_->client.call(std::move(call), deadline, cancelled);
}

}  // namespace torchft_ext

// A member's own record in the store: written, looked after, withdrawn, removed.
//
// States: not written; published (it may stand in the store); withdrawn (a withdrawal stands in its
// place); usurped (another process's stands there: it is left alone). Owner: a Rendezvous. Threads:
// that of its configure() only; what is not waited for is done by the store's thread.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "rendezvous/attempt_keys.h"
#include "rendezvous/records.h"
#include "rendezvous/store_thread.h"

namespace torchft_ext {

class OwnRecord {
 public:
  OwnRecord(std::shared_ptr<StoreThread> store, AttemptKeys keys, int rank, MemberRecord self,
            Deadline deadline, Cancelled cancelled);

  const MemberRecord& self() const { return self_; }

  // Each nullopt where all is well.
  std::optional<Failure> publish();
  // One look: a record that has vanished is written again.
  std::optional<Failure> check();
  // What was found under the own key.
  std::optional<Failure> judge(const std::string& bytes);
  std::optional<Failure> publishAgain();

  // Puts a withdrawal in the record's place, in the background, addressed to those who have come.
  void withdraw(const Ending& ending);
  // In place of publish(): a withdrawal alone. Blocks until its readers have come, until the
  // deadline at most.
  void decline(const Ending& ending);
  // In the background; not if another record has taken its place. A withdrawal stands first until
  // the slower readers have had time to see it, unless it is needed no more.
  void remove(bool at_once);

  // Did others delete it, before it was written again?
  bool vanished() const { return vanished_; }

 private:
  void writeWithdrawal(const Withdrawal& withdrawal);
  void addressWithdrawal(const Withdrawal& withdrawal);

  const std::shared_ptr<StoreThread> store_;
  const AttemptKeys keys_;
  const int rank_;
  const MemberRecord self_;
  const Deadline deadline_;
  const Cancelled cancelled_;
  bool published_ = false;
  std::optional<Clock::time_point> withdrawn_;  // when
  bool vanished_ = false;
  bool usurped_ = false;
};

}  // namespace torchft_ext

// A member's own record in the store: written, looked after, replaced, removed.
//
// States: not written; published (it may stand in the store); failed (a failure record stands in
// its place); usurped (another process's stands there: it is left alone). Owner: a Rendezvous.
// Threads: that of its configure() only; what is not waited for is done by the store's thread.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "membership/attempt_keys.h"
#include "membership/records.h"
#include "membership/store_thread.h"

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
  // What was found under the own key (empty: nothing): is it to be written again? If not, is it
  // the own record?
  static bool isGone(const std::string& bytes);
  std::optional<Failure> judge(const std::string& bytes);
  StoreReply publishAgain(Deadline deadline);

  // Puts a failure record in the record's place, in the background, addressed to those who have
  // come.
  void publishFailure(const Ending& ending);
  // In place of publish(): a failure record alone, whatever stands there of an earlier run.
  void publishFailedInit(const Ending& ending);
  // Looks at the places of these readers until each has ended too, and addresses the failure record
  // to all who come meanwhile. Ends early when the store is lost, another record has taken the own
  // place, or `cancelled` says so; if that throws, the failure record stands all the same.
  void awaitReaders(std::vector<std::string> readers, Deadline until, const Cancelled& cancelled);
  // In the background; not if another record has taken its place. A failure record stands first
  // until the slower readers have had time to see it, unless it is needed no more.
  void remove(bool at_once);

  // Did others delete it, before it was written again?
  bool vanished() const { return vanished_; }

 private:
  StoreReply write(Deadline deadline);
  void noteFailureRecord(const Ending& ending);
  void addressFailureRecord();
  bool tell(std::vector<std::string>& readers, Deadline until, const Cancelled& cancelled);
  std::optional<bool> failureRecordStands(Deadline until, const Cancelled& cancelled);
  bool hasRead(const std::string& found);

  const std::shared_ptr<StoreThread> store_;
  const AttemptKeys keys_;
  const int rank_;
  const MemberRecord self_;
  const Deadline deadline_;
  const Cancelled cancelled_;
  bool published_ = false;
  std::optional<FailureRecord> failure_record_;
  Clock::time_point failure_written_;  // when that was written last
  bool vanished_ = false;
  bool usurped_ = false;
};

}  // namespace torchft_ext

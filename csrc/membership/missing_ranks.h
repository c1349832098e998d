// Names those who did not come to an attempt, for the error of one who waited for them.
//
// Owner: whoever asks, for as long as that takes. Blocks in the store, until the deadline at most.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "membership/attempt_keys.h"
#include "membership/store_thread.h"

namespace torchft_ext {

class MissingRanks {
 public:
  // left_over: processes whose records do not count.
  MissingRanks(StoreThread& store, const AttemptKeys& keys, const std::set<Incarnation>& left_over,
               Deadline deadline, const Cancelled& cancelled)
      : store_(store),
        keys_(keys),
        left_over_(left_over),
        deadline_(deadline),
        cancelled_(cancelled) {}

  // As rank 0 sees it, but for one whose end is known. Empty: nobody is missing, as far as can be
  // seen.
  std::string nameMembers(int but = -1);
  // As the others see it. In small worlds they too look who else is missing; in large ones that is
  // left to rank 0, whose failure record tells it.
  std::string nameLeader();
  // False: the store left a question of either open.
  bool answered() const { return answered_; }

 private:
  std::string nameLeftOver(const std::vector<std::string>& records, int but = -1) const;
  void find(int first, int last, std::vector<int>& missing);

  StoreThread& store_;
  const AttemptKeys& keys_;
  const std::set<Incarnation>& left_over_;
  const Deadline deadline_;
  const Cancelled& cancelled_;
  bool answered_ = true;
};

}  // namespace torchft_ext

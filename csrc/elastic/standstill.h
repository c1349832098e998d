// Counts the views in which an elastic job does not get on: in a row, of the same members, and
// nothing succeeded in them. A value; knows no clock.
#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "elastic/view.h"

namespace torchft_ext {

class Standstill {
 public:
  static constexpr int kMostViews = 3;  // the last of them ends in an error
  static constexpr milliseconds kFirstPause{200};
  static constexpr milliseconds kLongestPause{10000};

  // A view of these members did not form, or the first thing that was tried in it failed. cause:
  // why; of a consequence (another member gave up, or left) only where no cause is known.
  void add(const View& view, std::string cause, bool is_consequence = false);
  // Something succeeded in the view.
  void clear();

  // Before the next view is asked for. The first failure is answered without a pause: a member was
  // lost, as a rule. Later pauses double, also for a caller that goes on after the error.
  Duration pause() const;
  bool isHopeless() const { return views_ >= kMostViews; }
  // The same, once for each view that was added.
  bool takeVerdict();
  // For an error: how many views, of how many members, and the cause.
  std::string describe() const;

 private:
  std::vector<MemberId> members_;
  int views_ = 0;
  uint64_t last_ = 0;  // the number of the last one
  std::string cause_;
  bool told_ = true;
};

}  // namespace torchft_ext
